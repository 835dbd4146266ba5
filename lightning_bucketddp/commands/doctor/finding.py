"""Findings: what the doctor says about one observation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

T = TypeVar("T")


class Severity(IntEnum):
    """How bad a finding is; the larger, the worse."""

    OK = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        theme: the heading that it is printed under.
        severity: how bad it is.
        text: one sentence.
        remedy: what to do about it, if anything.
    """

    theme: str
    severity: Severity
    text: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return {"theme": self.theme, "verdict": str(self.severity), "text": self.text, "remedy": self.remedy}


@dataclass(frozen=True, slots=True)
class Theme:
    """Makes findings under one heading."""

    name: str

    def ok(self, text: str) -> Finding:
        return Finding(self.name, Severity.OK, text)

    def note(self, text: str, remedy: str = "") -> Finding:
        return Finding(self.name, Severity.NOTE, text, remedy)

    def warning(self, text: str, remedy: str) -> Finding:
        return Finding(self.name, Severity.WARNING, text, remedy)

    def error(self, text: str, remedy: str) -> Finding:
        return Finding(self.name, Severity.ERROR, text, remedy)


# What a rank observed, as JSON.
Observation = Mapping[str, Any]


def ranks_by(ranks: Sequence[Observation], value_of: Callable[[Observation], T]) -> dict[T, list[int]]:
    """Return the ranks that have each value."""
    found: dict[T, list[int]] = {}
    for observed in ranks:
        found.setdefault(value_of(observed), []).append(observed["rank"])
    return found


def counted(number: int, noun: str) -> str:
    """Return the number with its noun: `1 rank`, `2 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def one_per_host(ranks: Sequence[Observation]) -> list[Observation]:
    """Return the first rank of each host."""
    return list({observed["host"]: observed for observed in reversed(ranks)}.values())[::-1]


def on(observed: Observation, ranks: Sequence[Observation]) -> str:
    """Return ` on HOSTNAME` if there are several hosts, else nothing."""
    return f" on {observed['hostname']}" if len(one_per_host(ranks)) > 1 else ""
