"""Findings: what the doctor says about one observation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from lightning_bucketddp.wording import list_some_ranks


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
    """The result of one check, in a sentence, and what to do about it; `theme` is the heading it is printed under."""

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


def differences(values: Mapping[int, Mapping[str, Any]], *, absent: str) -> dict[str, str]:
    """Return the names whose values differ between ranks, each with a text such as `2.5 on rank 0; none on rank 1`."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for of_rank in values.values() for name in of_rank):
        ranks: dict[Any, list[int]] = {}
        for rank, of_rank in values.items():
            ranks.setdefault(of_rank.get(name), []).append(rank)
        if len(ranks) > 1:
            found[name] = "; ".join(f"{value or absent} on {list_some_ranks(of)}" for value, of in ranks.items())
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
