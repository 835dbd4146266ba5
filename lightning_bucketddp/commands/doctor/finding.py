"""What the doctor says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

T = TypeVar("T")


class Verdict(IntEnum):
    """How bad something is; the larger, the worse."""

    OK = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        theme: what it belongs to.
        verdict: how bad it is.
        text: a sentence in plain words.
        remedy: what to do about it, if there is something to be done.
    """

    theme: str
    verdict: Verdict
    text: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return {"theme": self.theme, "verdict": str(self.verdict), "text": self.text, "remedy": self.remedy}


@dataclass(frozen=True, slots=True)
class Theme:
    """Makes the findings of one theme."""

    name: str

    def ok(self, text: str) -> Finding:
        return Finding(self.name, Verdict.OK, text)

    def note(self, text: str, remedy: str = "") -> Finding:
        return Finding(self.name, Verdict.NOTE, text, remedy)

    def warning(self, text: str, remedy: str) -> Finding:
        return Finding(self.name, Verdict.WARNING, text, remedy)

    def error(self, text: str, remedy: str) -> Finding:
        return Finding(self.name, Verdict.ERROR, text, remedy)


# What a rank has seen, as JSON.
Observation = Mapping[str, Any]


def ranks_by(ranks: Sequence[Observation], value_of: Callable[[Observation], T]) -> dict[T, list[int]]:
    """Which ranks have which value."""
    found: dict[T, list[int]] = {}
    for observed in ranks:
        found.setdefault(value_of(observed), []).append(observed["rank"])
    return found


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def one_per_host(ranks: Sequence[Observation]) -> list[Observation]:
    """The first rank of each host."""
    return list({observed["host"]: observed for observed in reversed(ranks)}.values())[::-1]


def on(observed: Observation, ranks: Sequence[Observation]) -> str:
    """Where that is, if there is more than one host to confuse it with."""
    return f" on {observed['hostname']}" if len(one_per_host(ranks)) > 1 else ""
