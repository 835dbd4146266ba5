"""Replicas that were equal and are no longer: what differs, on which ranks, and which rank to follow."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_bucketddp.wording import list_ranks

_MAX_SHOWN = 3
_CAUSES = (
    "Hardware that flips bits, or code that does not do the same on every rank (a condition on the rank, its own random"
    " numbers, a learning rate that follows a metric of its own), makes replicas drift."
)


class ReplicaDivergedError(RuntimeError):
    """The ranks no longer hold the same weights or optimizer state."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor or number that is not the same everywhere.

    Attributes:
        name: of the tensor or number.
        camps: ranks with equal values, the largest camp first; of equally large ones the one with the lowest rank.
        values: the value of each camp; None where it does not exist.
        is_number: the values are numbers, not checksums.
    """

    name: str
    camps: list[list[int]]
    values: list[Any]
    is_number: bool

    @property
    def exists_everywhere(self) -> bool:
        return None not in self.values

    @property
    def outvoted(self) -> list[int]:
        """Return the ranks that are not in the first camp."""
        return sorted(rank for camp in self.camps[1:] for rank in camp)

    def __str__(self) -> str:
        if not self.exists_everywhere:
            missing = self.camps[self.values.index(None)]
            having = sorted(rank for camp in self.camps if camp is not missing for rank in camp)
            return f"`{self.name}` exists on {list_ranks(having)} but not on {list_ranks(missing)}"
        if self.is_number:
            shown = [f"{value} on {list_ranks(camp)}" for value, camp in zip(self.values, self.camps, strict=True)]
            return f"`{self.name}` is {' but '.join(shown)}"
        if len(self.camps[0]) > len(self.outvoted):
            return f"`{self.name}` on {list_ranks(self.outvoted)} differs from that on the other ranks"
        return f"`{self.name}` differs between {' and '.join(list_ranks(camp) for camp in self.camps)}"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Everything that is not the same everywhere, and the rank to follow."""

    differences: list[Difference]
    source: int

    def __str__(self) -> str:
        shown = "; ".join(map(str, self.differences[:_MAX_SHOWN]))
        more = len(self.differences) - _MAX_SHOWN
        return f"{shown}{f'; and {more} more' if more > 0 else ''}. {_CAUSES}"


def find_divergence(by_rank: Mapping[int, Mapping[str, Any]], *, numbers: set[str]) -> Divergence | None:
    """Return what differs between the ranks' values; None if nothing does.

    Most ranks are right; where no camp is larger than another, the one with the lowest rank is.
    """
    differences = []
    for name in dict.fromkeys(name for values in by_rank.values() for name in values):
        camps: dict[str, list[int]] = {}
        for rank, values in by_rank.items():
            camps.setdefault(json.dumps(values.get(name)), []).append(rank)
        if len(camps) > 1:
            largest_first = sorted(camps.items(), key=lambda camp: (-len(camp[1]), camp[1]))
            values_of_camps = [json.loads(value) for value, _ in largest_first]
            ranks = [camp for _, camp in largest_first]
            differences.append(Difference(name, ranks, values_of_camps, name in numbers))
    if not differences:
        return None
    num_outvoted = Counter(rank for difference in differences for rank in difference.outvoted)
    return Divergence(differences, source=min(by_rank, key=lambda rank: (num_outvoted[rank], rank)))
