"""Evaluation data in rounds: in each round every rank runs one batch, and each sample counts on one rank.

Note: rounds
    All ranks run the same number of batches, and the batches of one round have the same size (why:
    docs/design/evaluation-rounds.md). Of n samples on W ranks each rank gets `base`, in ordinary batches, and E < W
    ranks get one more batch of s samples: n = W * base + E * s. There is such an E for every n if s and W have no
    common factor. The other W - E ranks repeat that batch, and take back what it counts. Rank zero has a batch of its
    own in every round.

    Batches of the user's own batch sampler are dealt out whole, and so are those of a stream. The last one may be
    smaller, so it has a round of its own.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler

from lightning_bucketddp.trainer_internals import batch_sampler_within

_MISSING: Any = object()

# At a time, because to change the random states takes up to a millisecond; not all, because some samplers never end.
_NUM_DRAWN = 64

_T = TypeVar("_T")


@dataclass(frozen=True)
class Part:
    """The part of the data that one rank gets.

    Attributes:
        seed: from which samplers draw their order; equal on all ranks, because they have to draw the same.
        repeats: a rank that has no batch of its own in a round repeats one.
    """

    rank: int
    world_size: int
    seed: int
    repeats: bool = True


class Rounds:
    """Deals out batches as they are, to the ranks in turn (Note: rounds).

    Attributes:
        has_last_apart: the last batch may be smaller than the others, and has a round of its own.
        num_own_batches: how many batches of the current pass are this rank's own; those behind them are repeated.
            Infinite until it is known.
    """

    def __init__(self, part: Part, *, has_last_apart: bool) -> None:
        self.part = part
        self.has_last_apart = has_last_apart
        self.num_own_batches: float = math.inf

    def number_of(self, num_batches: int) -> int:
        """Return how many of `num_batches` batches this rank gets."""
        num_last = int(self.has_last_apart and num_batches > 0)
        num_others = num_batches - num_last
        if self.part.repeats:
            return math.ceil(num_others / self.part.world_size) + num_last
        return len(range(self.part.rank, num_others, self.part.world_size)) + (num_last if self.part.rank == 0 else 0)

    def deal(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Return this rank's batch of each round. Three batches are held at a time, and never all."""
        self.num_own_batches = math.inf
        number = 0
        for first, own in self._rounds(batches):
            if own is not _MISSING:
                number += 1
                yield own
            else:
                self.num_own_batches = number
                if self.part.repeats:
                    yield first
        self.num_own_batches = number

    def _rounds(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Return the first batch of each round and this rank's own."""
        first = own = _MISSING
        position = 0
        for batch, is_last in _with_end(batches):
            if position and is_last and self.has_last_apart:
                yield first, own
                position = 0
            if position == 0:
                first, own = batch, _MISSING
            if position == self.part.rank:
                own = batch
            position = (position + 1) % self.part.world_size
            if position == 0 or is_last:
                yield first, own


class BatchShare(BatchSampler):
    """The batches of one rank, of all those that `original` gives. It looks like `original` otherwise.

    Attributes:
        num_own_batches: how many batches of the current pass are not repeated; infinite until it is known.
    """

    num_own_batches: float

    def __init__(self, original: Any, part: Part) -> None:
        # Lightning's sampler for predictions copies what is in here, and nothing else.
        vars(self).update(vars(original))
        self.original = original
        self.part = part
        self._draws = SharedDraws(part.seed)

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.original, name)

    def _drawn(self, values: Iterable[_T]) -> Iterator[_T]:
        return self._draws.through(values, epoch=getattr(getattr(self, "sampler", None), "epoch", 0))


class ShareOfSamples(BatchShare):
    """Every W-th sample, in batches of this rank's own, and a last one for some ranks (Note: rounds)."""

    num_own_batches: float = math.inf

    def __len__(self) -> int:
        num_samples = len(self.original.sampler)
        size: int = self.original.batch_size
        if not self.part.repeats:
            return math.ceil(math.ceil(num_samples / self.part.world_size) / size)
        base, extra = self._split(num_samples)
        return math.ceil(base / size) + (extra > 0)

    def __iter__(self) -> Iterator[list[Any]]:
        [samples] = self._drawn(list(sampler) for sampler in [self.original.sampler])  # drawn at once
        return iter(self._own_and_repeated(samples) if self.part.repeats else self._own_only(samples))

    def _own_and_repeated(self, samples: list[Any]) -> list[list[Any]]:
        rank, world_size, size = self.part.rank, self.part.world_size, self.original.batch_size
        base, extra = self._split(len(samples))
        own = samples[rank : world_size * base : world_size]
        batches = [own[at : at + size] for at in range(0, base, size)]
        self.num_own_batches = len(batches) + (rank < extra)
        if extra:
            batches.append(samples[world_size * base :][rank if rank < extra else 0 :: extra])
        return batches

    def _own_only(self, samples: list[Any]) -> list[list[Any]]:
        """Return as many batches on all ranks wherever there are enough samples; their sizes differ by one."""
        own = samples[self.part.rank :: self.part.world_size]
        number = len(self)
        batches = [own[len(own) * at // number : len(own) * (at + 1) // number] for at in range(number)]
        return [batch for batch in batches if batch]

    def _split(self, num_samples: int) -> tuple[int, int]:
        """Return `base` and E; s is the smallest that is possible, but for 1, which some models do not take."""
        world_size = self.part.world_size
        sizes = (size for size in range(2, self.original.batch_size + 1) if math.gcd(size, world_size) == 1)
        if (size := next(sizes, None)) is not None:
            extra = num_samples * pow(size, -1, world_size) % world_size
            if num_samples - extra * size >= world_size:  # every rank has a sample of its own
                return (num_samples - extra * size) // world_size, extra
        return divmod(num_samples, world_size)


class ShareOfBatches(BatchShare):
    """Every W-th batch, as it is (Note: rounds)."""

    def __init__(self, original: Any, part: Part) -> None:
        super().__init__(original, part)
        is_even = type(original) is BatchSampler and original.drop_last
        self.rounds = Rounds(part, has_last_apart=not is_even)

    @property
    def num_own_batches(self) -> float:  # type: ignore[override]
        return self.rounds.num_own_batches

    def __len__(self) -> int:
        return self.rounds.number_of(len(self.original))

    def __iter__(self) -> Iterator[Any]:
        return self.rounds.deal(self._drawn(self.original))


class ShareOfIndices(DistributedSampler[Any]):
    """Every W-th of the indices that `sampler` gives, for a loader that makes no batches of them.

    By its class Lightning knows that a loader has no need of a distributed sampler.
    """

    def __init__(self, sampler: Any, part: Part) -> None:
        self.sampler = sampler
        self.rounds = Rounds(part, has_last_apart=False)
        self._draws = SharedDraws(part.seed)

    @property
    def num_own_batches(self) -> float:
        """See `BatchShare`."""
        return self.rounds.num_own_batches

    def set_epoch(self, epoch: int) -> None:
        """Have the sampler draw another order."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        drawn = (list(sampler) for sampler in [self.sampler])
        [indices] = self._draws.through(drawn, epoch=getattr(self.sampler, "epoch", 0))
        return self.rounds.deal(indices)

    def __len__(self) -> int:
        return self.rounds.number_of(len(self.sampler))


class SharedDraws:
    """Random numbers for samplers that draw from those of the process: the same on all ranks, others in each pass."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epoch = 0
        self._num_passes = 0

    def through(self, sampler: Iterable[_T], *, epoch: int) -> Iterator[_T]:
        """Return what `sampler` gives in a new pass; the random numbers of this process stay as they are."""
        self._num_passes = self._num_passes + 1 if epoch == self._epoch else 1
        self._epoch = epoch
        return _drawn_from(random.Random(f"{self._seed} {epoch} {self._num_passes}").getrandbits(32), sampler)


def _drawn_from(seed: int, sampler: Iterable[_T]) -> Iterator[_T]:
    generator = torch.Generator().manual_seed(seed)
    inside = random.Random(seed).getstate(), np.random.RandomState(seed).get_state(), generator.get_state()
    values = (value for one in [sampler] for value in one)  # which calls `iter` when it is first asked
    while True:
        outside = _random_states()
        _set_random_states(inside)
        try:
            some = list(islice(values, _NUM_DRAWN))
        finally:
            inside = _random_states()
            _set_random_states(outside)
        if not some:
            return
        yield from some


def _random_states() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _set_random_states(states: tuple[Any, Any, Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


def _with_end(values: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Return each value, and whether it is the last one."""
    iterator = iter(values)
    ahead = next(iterator, _MISSING)
    while ahead is not _MISSING:
        value, ahead = ahead, next(iterator, _MISSING)
        yield value, ahead is _MISSING


def divided(loader: Any, part: Part) -> Any:
    """Return a loader like `loader`, which gives all samples to every rank, for this rank's part of them."""
    loader = copy.copy(loader)
    sampler = ShareOfIndices(loader.sampler, part)
    divide(loader, part)
    object.__setattr__(loader, "sampler", sampler)
    return loader


def divide(loader: Any, part: Part, *, keeps_batches: bool = False) -> None:
    """Have `loader`, a DataLoader that gives all samples to every rank, give this rank its part.

    Args:
        keeps_batches: deal out the batches of one process.
    """
    if loader.batch_sampler is None:
        object.__setattr__(loader, "sampler", ShareOfIndices(loader.sampler, part))  # which the loader itself forbids
        return
    inner = batch_sampler_within(loader.batch_sampler)
    makes_own_batches = type(inner) is BatchSampler and not inner.drop_last and not keeps_batches
    share = ShareOfSamples(inner, part) if makes_own_batches else ShareOfBatches(inner, part)
    batch_sampler = share if inner is loader.batch_sampler else type(loader.batch_sampler)(share)
    object.__setattr__(loader, "batch_sampler", batch_sampler)


def share_of(loader: Any) -> BatchShare | ShareOfIndices | Rounds | None:
    """Return what deals out the data of `loader` for evaluation; None: nothing does."""
    if isinstance(rounds := getattr(loader, "rounds", None), Rounds):
        return rounds
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (batch_sampler_within(batch_sampler), getattr(loader, "sampler", None)):
        if isinstance(sampler, BatchShare | ShareOfIndices):
            return sampler
    return None
