"""The one way to change a dataloader; and evaluation in rounds: every rank runs a batch, each sample counts once.

Note: rounds
    All ranks run the same number of batches, and the batches of one round have the same size (why:
    docs/design/evaluation-rounds.md). Of n samples on W ranks each rank gets `base`, in ordinary batches, and E < W
    ranks get one more batch of s samples: n = W * base + E * s. There is such an E for every n if s and W have no
    common factor. The other W - E ranks repeat that batch, and its samples are not counted there. Rank zero has a batch
    of its own in every round. Batches of a stream or of the user's own batch sampler are dealt out whole. The last one
    may be smaller, so it has a round of its own.
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
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from lightning_bucketddp.trainer_internals import batch_sampler_within


def changed_loader(loader: Any, members: dict[str, Any] | None = None, **attributes: Any) -> Any:
    """Return a copy of `loader` with other `attributes`; `members` replace those of its class."""
    changed = copy.copy(loader)
    if attributes:
        # `DataLoader` forbids to set these. Persistent workers have the old ones.
        vars(changed).update(attributes, _iterator=None)
    if members is not None:
        original: Any = type(loader)
        before, iterate = dict(vars(loader)), members.get("__iter__", original.__iter__)

        def iterate_anew(this: Any) -> Any:
            # The program may have kept its loader, and set attributes there.
            now = {name: it for name, it in vars(loader).items() if it is not before.get(name, _MISSING)}
            vars(this).update({name: it for name, it in now.items() if name not in ("_iterator", *attributes)})
            return iterate(this)

        # Still an instance of its own class: users and Lightning ask for that, and set attributes of the class.
        namespace = {"__module__": original.__module__, **members, "__iter__": iterate_anew}
        changed.__class__ = type(original.__name__, (original,), namespace)
    return changed


def is_even(loader: Any) -> bool:
    """Return whether a sampler gives every rank the same number of samples."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def length_of(sized: Any) -> float:
    """Return the length; infinite: it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return math.inf


_MISSING: Any = object()

# How many values are drawn at a time: exchanging random states takes up to a millisecond, but some samplers never end.
_NUM_DRAWN = 64

_T = TypeVar("_T")


@dataclass(frozen=True)
class Part:
    """The part of the data that one rank gets."""

    rank: int
    world_size: int
    seed: int  # equal on all ranks, because their samplers have to draw the same order
    repeats: bool = True  # a rank that has no batch of its own in a round repeats one


@dataclass(eq=False)
class Rounds:
    """Deals out batches as they are, to the ranks in turn (Note: rounds)."""

    part: Part
    has_last_apart: bool  # the last batch has a round of its own
    # This rank repeats the batches after its own; in the rounds after the whole ones some rank repeats one. Valid for
    # batches that are dealt out, also while user code reads the first ones again; infinite until it is known.
    num_own_batches: float = math.inf
    num_whole_rounds: float = math.inf

    def number_of(self, num_batches: int) -> int:
        """Return how many of `num_batches` batches this rank gets."""
        num_last = int(self.has_last_apart and num_batches > 0)
        num_others = num_batches - num_last
        if self.part.repeats:
            return math.ceil(num_others / self.part.world_size) + num_last
        return len(range(self.part.rank, num_others, self.part.world_size)) + (num_last if self.part.rank == 0 else 0)

    def deal(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Return this rank's batch of each round. Three batches are held at a time, and never all."""
        number = 0
        for first, own, is_whole in self._rounds(iter(batches)):
            if not is_whole:
                self.num_whole_rounds = min(self.num_whole_rounds, number)
            elif number >= self.num_whole_rounds:  # an earlier pass had fewer
                self.num_whole_rounds = math.inf
            if own is not _MISSING:
                if number >= self.num_own_batches:
                    self.num_own_batches = math.inf
                number += 1
                yield own
            else:
                self.num_own_batches = number
                if self.part.repeats:
                    yield first
        self.num_own_batches = number

    def _rounds(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Any, bool]]:
        """Return the first batch of each round, this rank's own, and whether every rank has one."""
        first = own = _MISSING
        position = 0
        ahead = next(batches, _MISSING)
        while ahead is not _MISSING:
            batch, ahead = ahead, next(batches, _MISSING)
            is_last = ahead is _MISSING
            if position and is_last and self.has_last_apart:
                yield first, own, False
                position = 0
            if position == 0:
                first, own = batch, _MISSING
            if position == self.part.rank:
                own = batch
            position = (position + 1) % self.part.world_size
            if position == 0 or is_last:
                yield first, own, position == 0


@dataclass(eq=False)
class SharedDraws:
    """Random numbers for samplers that draw from the generators of the process: equal on all ranks, new in each pass.

    The generators of the process stay as they are.
    """

    seed: int
    _epoch: int = 0
    _num_passes: int = 0

    def through(self, values: Iterable[_T], *, num_drawn: int | None = _NUM_DRAWN) -> Iterator[_T]:
        """Yield what a sampler or batch sampler gives in a new pass; draw `num_drawn` at a time, or all at once."""
        epoch = getattr(getattr(values, "sampler", values), "epoch", 0)
        self._num_passes = self._num_passes + 1 if epoch == self._epoch else 1
        self._epoch = epoch
        seed = random.Random(f"{self.seed} {epoch} {self._num_passes}").getrandbits(32)
        generator = torch.Generator().manual_seed(seed)
        inside = random.Random(seed).getstate(), np.random.RandomState(seed).get_state(), generator.get_state()
        drawn = (value for one in [values] for value in one)  # calls `iter` when it is first asked
        while True:
            outside = _exchange_random_states(inside)
            try:
                some = list(islice(drawn, num_drawn))
            finally:
                inside = _exchange_random_states(outside)
            if not some:
                return
            yield from some


def _exchange_random_states(states: tuple[Any, Any, Tensor]) -> tuple[Any, Any, Tensor]:
    """Set the random states of this process; return those that it had."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])
    return before


class ShareOfBatches(BatchSampler):
    """Every W-th batch that `original` gives, as it is (Note: rounds). Other attributes are those of `original`."""

    def __init__(self, original: Any, part: Part) -> None:
        # Lightning's sampler for predictions copies these attributes, and no others.
        vars(self).update(vars(original))
        self.original = original
        self.part = part
        drops_last = type(original) is BatchSampler and original.drop_last
        self.rounds = Rounds(part, has_last_apart=not drops_last)
        self._draws = SharedDraws(part.seed)

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.original, name)

    def __len__(self) -> int:
        return self.rounds.number_of(len(self.original))

    def __iter__(self) -> Iterator[Any]:
        return self.rounds.deal(self._draws.through(self.original))


class ShareOfSamples(ShareOfBatches):
    """Every W-th sample, in batches of this rank's own, and a last one for some ranks (Note: rounds)."""

    def __len__(self) -> int:
        num_samples = len(self.original.sampler)
        size: int = self.original.batch_size
        if not self.part.repeats:
            return math.ceil(math.ceil(num_samples / self.part.world_size) / size)
        base, extra = self._split(num_samples)
        return math.ceil(base / size) + (extra > 0)

    def __iter__(self) -> Iterator[list[Any]]:
        sampler, size = self.original.sampler, self.original.batch_size
        rank, world_size = self.part.rank, self.part.world_size
        samples = list(self._draws.through(sampler, num_drawn=None))
        if not self.part.repeats:
            # As many batches on all ranks wherever there are enough samples; their sizes differ by one.
            own, number = samples[rank::world_size], len(self)
            batches = [own[len(own) * at // number : len(own) * (at + 1) // number] for at in range(number)]
            return iter([batch for batch in batches if batch])
        base, extra = self._split(len(samples))
        own = samples[rank : world_size * base : world_size]
        batches = [own[at : at + size] for at in range(0, base, size)]
        self.rounds.num_whole_rounds = len(batches)
        self.rounds.num_own_batches = len(batches) + (rank < extra)
        if extra:
            batches.append(samples[world_size * base :][rank if rank < extra else 0 :: extra])
        return iter(batches)

    def _split(self, num_samples: int) -> tuple[int, int]:
        """Return `base` and E; s is the smallest that is possible, but for 1, which some models do not take."""
        world_size = self.part.world_size
        sizes = (size for size in range(2, self.original.batch_size + 1) if math.gcd(size, world_size) == 1)
        if (size := next(sizes, None)) is not None:
            extra = num_samples * pow(size, -1, world_size) % world_size
            if num_samples - extra * size >= world_size:  # every rank has a sample of its own
                return (num_samples - extra * size) // world_size, extra
        return divmod(num_samples, world_size)


class ShareOfIndices(DistributedSampler[Any]):
    """Every W-th of the indices that `sampler` gives, for a loader that makes no batches of them.

    Lightning adds a distributed sampler to a loader unless its sampler is a `DistributedSampler`.
    """

    def __init__(self, sampler: Any, part: Part) -> None:
        self.sampler = sampler
        self.rounds = Rounds(part, has_last_apart=False)
        self._draws = SharedDraws(part.seed)

    def set_epoch(self, epoch: int) -> None:
        """Have the sampler draw another order."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return self.rounds.deal(list(self._draws.through(self.sampler, num_drawn=None)))

    def __len__(self) -> int:
        return self.rounds.number_of(len(self.sampler))


class Selection(Sampler[Any]):
    """The samples that `sampler` gives, by a class that Lightning does not know."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


class Batches(BatchSampler):
    """Torch's, by a class that Lightning makes anew with another sampler, where it would forget the batch size."""


def with_selection(loader: Any) -> Any:
    """Return `loader` such that Lightning divides what its sampler selects.

    In the place of torch's own samplers it divides the whole dataset, also if they select or repeat samples, and looks
    into no `BatchSampler` of torch's.
    """
    if not isinstance(loader, DataLoader):
        return loader
    batches: Any = loader.batch_sampler
    if loader.batch_size is None and type(batches) is BatchSampler and not is_even(loader):
        again = Batches(batches.sampler, batches.batch_size, batches.drop_last)
        return changed_loader(loader, sampler=Selection(batches.sampler), batch_sampler=again)
    sampler: Any = loader.sampler
    gives_all = length_of(sampler) == length_of(loader.dataset) and not getattr(sampler, "replacement", False)
    if gives_all or not isinstance(sampler, RandomSampler | SequentialSampler):
        return loader
    return changed_loader(loader, sampler=Selection(sampler))


def divided(loader: Any, part: Part, *, keeps_batches: bool = False) -> Any:
    """Return a loader like `loader`, which gives all samples to every rank, for this rank's `part` of them.

    With `keeps_batches` the batches of one process are dealt out.
    """
    changes: dict[str, Any] = {}
    # Without repetitions it goes to `fabric.setup_dataloaders`, which checks the class of the sampler.
    if loader.batch_sampler is None or not part.repeats:
        changes["sampler"] = ShareOfIndices(loader.sampler, part)
    if loader.batch_sampler is not None:
        inner = batch_sampler_within(loader.batch_sampler)
        makes_own_batches = type(inner) is BatchSampler and not inner.drop_last and not keeps_batches
        share = ShareOfSamples(inner, part) if makes_own_batches else ShareOfBatches(inner, part)
        is_wrapped = inner is not loader.batch_sampler
        changes["batch_sampler"] = type(loader.batch_sampler)(share) if is_wrapped else share
    return changed_loader(loader, **changes)


def share_of(loader: Any) -> Rounds | None:
    """Return the rounds in which the data of `loader` is dealt out for evaluation; None: it is not dealt out."""
    batch_sampler = batch_sampler_within(getattr(loader, "batch_sampler", None))
    for dealer in (loader, batch_sampler, getattr(loader, "sampler", None)):
        if isinstance(rounds := getattr(dealer, "rounds", None), Rounds):
            return rounds
    return None
