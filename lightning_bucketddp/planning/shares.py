"""Which rank keeps which part of a bucket, and of the parameters in it. Pure: no tensors, no communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shares:
    """How a bucket is divided among ranks: into equal slices, or not at all."""

    num_ranks: int
    owner: int | None = None  # the rank that keeps all of it; None: each rank keeps a slice

    def padded(self, numel: int, *, align: int) -> int:
        """Return how many elements a buffer for `numel` needs, so that each rank's share begins at a multiple."""
        unit = align * (self.num_ranks if self.owner is None else 1)
        return -(-numel // unit) * unit

    def bounds(self, numel: int) -> list[tuple[int, int]]:
        """Return which of the `numel` elements of a bucket each rank keeps, by rank, from and to."""
        if self.owner is not None:
            return [(0, numel) if rank == self.owner else (0, 0) for rank in range(self.num_ranks)]
        size = numel // self.num_ranks
        return [(rank * size, (rank + 1) * size) for rank in range(self.num_ranks)]

    def ranges(self, offset: int, numel: int, *, of: int) -> list[tuple[int, int]]:
        """Return by rank which elements of a parameter, at `offset` in a bucket of `of` elements, it keeps."""
        return [
            (min(max(start - offset, 0), numel), min(max(stop - offset, 0), numel)) for start, stop in self.bounds(of)
        ]


def balance(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Return an owner for each of `sizes`, the largest first and to whom has least; `loads`, by rank, are updated."""
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += sizes[index]
    return owners
