"""Batches of evaluation data, divided among the ranks so that each sample is seen by exactly one of them.

Note: equal numbers of batches
    Steps of an evaluation may have collectives in them: a metric that is synchronised, a barrier. So every rank gets
    the same number of batches. Of n samples, ranks have n/W, rounded down or up; where the last sample would begin a
    batch on some ranks only, the others split their last batch in two. What cannot be split, a batch of one sample or
    no sample at all, is repeated, and whoever runs the step takes back what it counts (`num_own_batches`).
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler


@dataclass(frozen=True)
class Part:
    """The part of the data that one rank gets.

    Attributes:
        seed: from which samplers draw their order; equal on all ranks, because they have to draw the same.
        repeats: a rank that has a batch less than others repeats one.
    """

    rank: int
    world_size: int
    seed: int
    repeats: bool = True


class BatchShare(BatchSampler):
    """The batches of one rank, of all those that `original` gives. It looks like `original` otherwise.

    Attributes:
        num_own_batches: the batches since the last `iter` that are not repeated.
    """

    def __init__(self, original: Any, part: Part) -> None:
        # Lightning's sampler for predictions copies what is in here, and nothing else.
        vars(self).update(vars(original))
        self.original = original
        self.part = part
        self.num_own_batches = 0

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.original, name)

    def __iter__(self) -> Iterator[list[Any]]:
        with _same_random_numbers(self.part.seed):
            batches = self._own_batches()
            self.num_own_batches = len(batches)
            if self.part.repeats and len(batches) < len(self):
                batches.append(batches[-1] if batches else self._any_sample())
        return iter(batches)

    def __len__(self) -> int:
        return math.ceil(len(self.original) / self.part.world_size)

    def _own_batches(self) -> list[list[Any]]:
        raise NotImplementedError

    def _any_sample(self) -> list[Any]:
        return list(next(iter(self.original)))[:1]


class ShareOfSamples(BatchShare):
    """Every W-th sample, in batches of this rank's own (Note: equal numbers of batches).

    With `drop_last` all batches are full, and the samples at the end that are too few for one on every rank are left.
    """

    def __len__(self) -> int:
        batch_size: int = self.original.batch_size
        return math.ceil(math.ceil(self._num_samples / self.part.world_size) / batch_size)

    @property
    def _num_samples(self) -> int:
        num_samples: int = len(self.original.sampler)
        per_round: int = self.part.world_size * self.original.batch_size
        return num_samples - num_samples % per_round if self.original.drop_last else num_samples

    def _own_batches(self) -> list[list[Any]]:
        samples = list(islice(self.original.sampler, self.part.rank, self._num_samples, self.part.world_size))
        size = self.original.batch_size
        batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        return _split_until(batches, len(self)) if batches else []


class ShareOfBatches(BatchShare):
    """Every W-th batch; the last ones are split where there is not one for each rank."""

    def _own_batches(self) -> list[list[Any]]:
        batches = [list(batch) for batch in self.original]
        world_size = self.part.world_size
        # The last round that is full, too: what is left may be a single sample.
        first = max(len(batches) // world_size - 1, 0) * world_size
        last = _split_until(batches[first:], math.ceil(len(batches[first:]) / world_size) * world_size)
        return [*batches[:first], *last][self.part.rank :: world_size]


class ShareOfWholeBatches(BatchShare):
    """Every W-th batch, as it is."""

    def _own_batches(self) -> list[list[Any]]:
        return [list(batch) for batch in islice(self.original, self.part.rank, None, self.part.world_size)]


class ShareOfIndices(DistributedSampler[Any]):
    """Every W-th of the indices that `sampler` gives, for a loader that makes no batches of them.

    By its class Lightning knows that a loader has no need of a distributed sampler.
    """

    def __init__(self, sampler: Any, part: Part) -> None:
        self.sampler = sampler
        self.share = ShareOfSamples(BatchSampler(sampler, batch_size=1, drop_last=False), part)

    @property
    def num_own_batches(self) -> int:
        """The indices since the last `iter` that are not repeated."""
        return self.share.num_own_batches

    def set_epoch(self, epoch: int) -> None:
        """Have the sampler draw another order."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return (batch[0] for batch in self.share)

    def __len__(self) -> int:
        return len(self.share)


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
        keeps_batches: deal out batches as they are, even if some ranks get one more than others.
    """
    if loader.batch_sampler is None:
        share: Any = ShareOfIndices(loader.sampler, part)
        object.__setattr__(loader, "sampler", share)  # which the loader itself forbids
        return
    # In a prediction, Lightning's sampler that remembers the indices is around the one that makes the batches.
    inner = getattr(loader.batch_sampler, "_batch_sampler", loader.batch_sampler)
    if keeps_batches:
        share = ShareOfWholeBatches(inner, part)
    else:
        share = ShareOfSamples(inner, part) if type(inner) is BatchSampler else ShareOfBatches(inner, part)
    batch_sampler = share if inner is loader.batch_sampler else type(loader.batch_sampler)(share)
    object.__setattr__(loader, "batch_sampler", batch_sampler)


def share_of(loader: Any) -> BatchShare | ShareOfIndices | None:
    """Return what `divide` has put into `loader`; None: it has not."""
    for sampler in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        if isinstance(sampler, BatchShare | ShareOfIndices):
            return sampler
    return None


def _split_until(batches: Sequence[list[Any]], num_batches: int) -> list[list[Any]]:
    """Return `batches`, the largest of them split in two, until there are `num_batches` or all have one sample."""
    pieces = list(batches)
    while len(pieces) < num_batches:
        # The last of those that are equally large.
        largest = max(range(len(pieces)), key=lambda at: (len(pieces[at]), at))
        batch = pieces[largest]
        if len(batch) < 2:
            break
        middle = math.ceil(len(batch) / 2)
        pieces[largest : largest + 1] = [batch[:middle], batch[middle:]]
    return pieces


@contextmanager
def _same_random_numbers(seed: int) -> Iterator[None]:
    """Draw from `seed` inside, as all ranks do, and leave this rank's own random numbers as they are."""
    numpy: Any = sys.modules.get("numpy")
    torch_state, state = torch.default_generator.get_state(), random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
