"""Reducing a few numbers of every rank between the hosts, in the background and in O(log N) rounds.

Note: recursive doubling
    gloo's all-gather and all-reduce go round a ring: N - 1 rounds and more. Here each rank exchanges what it has so far
    with rank ^ 1, then with rank ^ 2, rank ^ 4 and so on. Ranks beyond the largest power of two hand theirs to a
    partner before, and get the result from it at the end. Two that exchange add the same two numbers, so all ranks have
    the same bits in the end. Up to four ranks a ring is as short, and gloo goes round it by itself.

Note: a thread for the rounds
    A rank that has started a reduction may be anywhere when the others need it for their next round: in a long
    backward, in a validation, at its end. gloo neither goes on to the next round by itself nor tells whether a message
    has come. So a thread takes the rounds, of one reduction after the other, in the order in which they were started.
    That order is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives, PendingGather
from lightning_bucketddp.comm.worker import Worker

_RING_UP_TO = 4
# What else goes from rank to rank through the group has tag 0.
_TAG = 1


@dataclass(frozen=True, slots=True)
class Reduced:
    """What becomes of the numbers of all ranks.

    Attributes:
        total: the sum over the ranks, of each number.
        least: the smallest.
        greatest: the largest.
        by_rank: all numbers of each rank; may be empty if nobody needs them.
    """

    total: list[float]
    least: list[float]
    greatest: list[float]
    by_rank: list[list[float]] = field(default_factory=list)


class PendingReduced(Protocol):
    """A reduction in flight."""

    @property
    def has_arrived(self) -> bool:
        """Return whether `wait` would return at once, and no rank needs this one any more."""

    def wait(self) -> Reduced:
        """Return the result, which is the same on all ranks."""


class SmallReduce(Protocol):
    """Reduces numbers. All ranks start the same reductions, in one order, with equally many numbers."""

    def start(self, numbers: Sequence[float]) -> PendingReduced:
        """Start to reduce the numbers of all ranks."""

    def close(self) -> None:
        """Start nothing more."""


def small_reduce(hosts: Collectives, *, needs_all: Callable[[Reduced], bool]) -> SmallReduce:
    """Return what suits the number of ranks. All numbers `by_rank` are there if `needs_all` says so of the rest."""
    if hosts.world_size <= _RING_UP_TO:
        return RingReduce(hosts)
    return DoublingReduce(hosts, needs_all=needs_all)


class RingReduce:
    """Has all ranks gather all numbers."""

    def __init__(self, hosts: Collectives) -> None:
        self._hosts = hosts

    def start(self, numbers: Sequence[float]) -> PendingReduced:
        return _Gathered(self._hosts.start_gather(torch.tensor(numbers, dtype=torch.float64)))

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Gathered:
    pending: PendingGather

    @property
    def has_arrived(self) -> bool:
        return self.pending.has_arrived

    def wait(self) -> Reduced:
        by_rank = [tensor.tolist() for tensor in self.pending.wait()]
        fields = list(zip(*by_rank, strict=True))
        return Reduced([sum(f) for f in fields], [min(f) for f in fields], [max(f) for f in fields], by_rank)


@dataclass(frozen=True, slots=True)
class Round:
    """What a rank does in a round: it sends what it has, or receives, or both.

    Attributes:
        gets_result: what it receives takes the place of what it has.
    """

    partner: int
    sends: bool = True
    receives: bool = True
    gets_result: bool = False


def rounds_of(rank: int, world_size: int) -> list[Round]:
    """Return the rounds that `rank` takes part in (Note: recursive doubling)."""
    num_paired = 1 << (world_size.bit_length() - 1)
    if rank >= num_paired:
        partner = rank - num_paired
        return [Round(partner, receives=False), Round(partner, sends=False, gets_result=True)]
    rounds = [Round(rank ^ (1 << bit)) for bit in range(num_paired.bit_length() - 1)]
    if (beyond := rank + num_paired) < world_size:
        return [Round(beyond, sends=False), *rounds, Round(beyond, receives=False)]
    return rounds


class DoublingReduce:
    """Has a thread exchange sums with one partner after the other (Note: a thread for the rounds)."""

    def __init__(self, hosts: Collectives, *, needs_all: Callable[[Reduced], bool]) -> None:
        self.group = hosts.group
        self._rounds = _Rounds(hosts, needs_all)
        self._worker = Worker("bucketddp-reduce")

    def start(self, numbers: Sequence[float]) -> PendingReduced:
        return _InThread(self._worker.submit(partial(self._rounds.reduce, list(numbers))))

    def close(self) -> None:
        self._worker.close()


@dataclass(frozen=True, slots=True)
class _InThread:
    future: Future[Reduced]

    @property
    def has_arrived(self) -> bool:
        return self.future.done()

    def wait(self) -> Reduced:
        return self.future.result()


class _Rounds:
    """Takes the rounds of one reduction."""

    def __init__(self, hosts: Collectives, needs_all: Callable[[Reduced], bool]) -> None:
        self._group: Any = hosts.group
        self._rank = hosts.rank
        self._world_size = hosts.world_size
        self._rounds = rounds_of(hosts.rank, hosts.world_size)
        self._needs_all = needs_all

    def reduce(self, numbers: list[float]) -> Reduced:
        own = torch.tensor([numbers, numbers, [-number for number in numbers]], dtype=torch.float64)
        total, greatest, negated_least = self._combine(own).tolist()
        reduced = Reduced(total, [-number for number in negated_least], greatest)
        if self._needs_all(reduced):
            row = torch.zeros(1, self._world_size, len(numbers), dtype=torch.float64)
            row[0, self._rank] = own[0]
            reduced.by_rank.extend(self._combine(row)[0].tolist())
        return reduced

    def _combine(self, own: Tensor) -> Tensor:
        """Return the first row added up over the ranks, and the maximum of each other row."""
        for this in self._rounds:
            received = torch.empty_like(own)
            works = [self._group.send([own], this.partner, _TAG)] if this.sends else []
            if this.receives:
                works.append(self._group.recv([received], this.partner, _TAG))
            for work in works:
                work.wait()
            if this.gets_result:
                own = received
            elif this.receives:
                own = torch.cat([own[:1] + received[:1], torch.maximum(own[1:], received[1:])])
        return own
