"""Resuming within an epoch: no sample twice, and none left out.

Note: position
    A checkpoint holds how many batches of its epoch went into the weights: those before the last optimizer's step.
    Lightning's own count may be behind, where an exception came after the step and before the batch was over, or ahead,
    where gradients were being accumulated, which are lost. It is set right when the checkpoint is loaded.

    Those batches are left out by the sampler, which costs no reading. Most samplers begin an epoch by drawing a seed
    or an order from one of torch's generators: the state of that generator then is in the checkpoint, too, but not for
    a `DistributedSampler`, which knows its order by the number of the epoch.

Note: fewer ranks
    Each rank takes every n-th sample of an order that does not depend on the number of ranks. So the samples that all
    ranks have seen are a number of whole batches of another number of ranks, and a rest. The rest is seen again.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, SequentialSampler

from lightning_bucketddp.data.sharded_iterable import is_dealt

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# Where a checkpoint holds what is ours, and there what is this file's.
_OURS, _KEY = "bucketddp", "position"
_COUNTS = ("ready", "started", "processed", "completed")
# Lightning's, about loaders that do not know themselves where they were.
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class ResumableSampler(Sampler[Any]):
    """What `sampler` gives, in the first pass without what was trained on before. Attributes are those of `sampler`.

    Attributes:
        generator_at_start: state of the generator when the pass began; None: there was none, or none is needed.
    """

    def __init__(self, sampler: Any, *, num_to_skip: Callable[[], int], generator_at_start: Tensor | None) -> None:
        self._sampler = sampler
        self._num_to_skip: Callable[[], int] = num_to_skip
        self._draws = _random_sampler(sampler) is not None
        self._restored = generator_at_start
        self.generator_at_start = generator_at_start

    @property
    def num_to_skip(self) -> int:
        """How much the next pass leaves out."""
        return self._num_to_skip()

    def __iter__(self) -> Iterator[Any]:
        # For one pass. Not before its first batch is asked for: a loader with workers makes two iterators, and drops
        # one.
        num_to_skip, self._num_to_skip = self.num_to_skip, lambda: 0
        restored, self._restored = self._restored, None
        rest = islice(self._sampler, num_to_skip, None)
        if not self._draws:
            yield from rest
            return
        own = getattr(_random_sampler(self._sampler), "generator", None)
        generator: torch.Generator = torch.default_generator if own is None else own
        now = generator.get_state()
        if restored is not None:
            generator.set_state(restored)
        self.generator_at_start = generator.get_state()
        # Draws what the sampler draws.
        first = list(islice(rest, 1))
        if restored is not None and own is None:
            # All others that draw from it go on where they are.
            generator.set_state(now)
        yield from first
        yield from rest

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler" or name.startswith("__"):  # asked for while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self._sampler, name)


def _random_sampler(sampler: Any) -> Any:
    """Return the sampler whose generator decides what `sampler` gives; None: no generator does."""
    while (inner := getattr(sampler, "sampler", None)) is not None:
        sampler = inner
    if type(sampler) in (DistributedSampler, SequentialSampler):
        return None
    # Lightning's wrapper around a sampler of the user's.
    return getattr(getattr(sampler, "dataset", None), "_sampler", sampler)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of an optimizer: how many epochs were begun then, how many batches of the last, and steps in all."""

    num_epochs: int
    num_batches: int
    number: int | None


@dataclass(frozen=True, slots=True)
class _Resumed:
    """What a run that is resumed has behind it (Note: position)."""

    epoch: int
    num_batches: int
    is_end_of_epoch: bool
    generators: list[Tensor | None]
    has_other_ranks: bool


class NoEpochPosition:
    """Lightning says where a resumed run begins, and loaders what they give then."""

    def begin(self, trainer: Trainer) -> None:
        """Begin a fit."""

    def forget_checkpoint(self) -> None:
        """Forget the checkpoint that was loaded: no training has begun with it."""

    def take_from(self, checkpoint: dict[str, Any], trainer: Trainer) -> None:
        """Set the counts in `checkpoint` right, for the training that begins with it."""

    def begin_loaders(self) -> None:
        """Expect training dataloaders."""

    def prepare(self, loader: Any) -> Any:
        """Return a training dataloader that leaves out what was trained on."""
        return loader

    def resume(self) -> None:
        """Call before the first batch."""

    def complete_step(self) -> None:
        """Note that an optimizer has stepped."""

    def num_batches_trained(self) -> int | None:
        """Return how many batches of the epoch are in the weights; None: it is Lightning who counts."""
        return None

    def state(self) -> dict[str, Any] | None:
        """Return what goes into a checkpoint; `generators` of every rank, by rank."""
        return None


class EpochPosition(NoEpochPosition):
    """Counts the batches of an epoch that are in the weights (Note: position).

    Args:
        counts_samples: the batch size may be another when the run is resumed, and who sets it also leaves samples out.
    """

    def __init__(self, *, counts_samples: bool) -> None:
        self._counts_samples = counts_samples
        self._trainer: Trainer | None = None
        self._at_step: _Step | None = None
        self._resumed: _Resumed | None = None
        self._samplers: list[ResumableSampler | None] = []
        self._can_skip = True
        self._filter: Any = None

    def begin(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def forget_checkpoint(self) -> None:
        self._resumed = None

    def take_from(self, checkpoint: dict[str, Any], trainer: Trainer) -> None:
        saved = checkpoint.get(_OURS, {}).get(_KEY)
        loop = checkpoint.get("loops", {}).get("fit_loop")
        if trainer.state.fn != "fit" or saved is None or loop is None:
            return
        epochs, batches = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]
        num_batches, num_ranks = saved["num_batches"], trainer.world_size
        is_end = batches["is_last_batch"] = batches["is_last_batch"] and num_batches == batches["current"]["ready"]
        has_other_ranks = num_ranks != saved["world_size"] and not self._counts_samples
        if has_other_ranks and not is_end:  # (Note: fewer ranks)
            num_batches = num_batches * saved["world_size"] // num_ranks
            num_batches -= num_batches % trainer.accumulate_grad_batches
        _set_counts(batches, num_batches)
        _set_step(loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"], saved["step"])
        is_counted = epochs["started"] == epochs["processed"]
        if is_end and not is_counted and batches["current"]["completed"] < num_batches and trainer.max_steps == -1:
            # As if saved at the end of the epoch. Otherwise Lightning does not count the next one as begun.
            for name in ("current", "total"):
                loop["epoch_progress"][name]["processed"] += 1
                batches[name]["completed"] += 1
            is_counted = True
        self._at_step = _Step(epochs["started"], num_batches, saved["step"])
        self._resumed = _Resumed(
            epochs["processed"] + (is_end and not is_counted),
            0 if is_end else num_batches,
            is_end,
            # After a failure there is only that of the rank that has saved.
            saved["generators"][trainer.global_rank if len(saved["generators"]) == num_ranks else 0],
            has_other_ranks,
        )

    def begin_loaders(self) -> None:
        self._samplers, self._can_skip = [], True

    def prepare(self, loader: Any) -> Any:
        self._samplers.append(None)
        if is_dealt(loader):
            return loader
        has_samples = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if not has_samples or hasattr(loader, "load_state_dict"):
            self._can_skip = False
            return loader
        return loader if self._counts_samples else self._with_sampler(loader)

    def _with_sampler(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        resumed, index = self._resumed, len(self._samplers) - 1
        generator = None
        if resumed is not None:
            if resumed.num_batches > 0 and index < len(resumed.generators) and not resumed.has_other_ranks:
                generator = resumed.generators[index]
            samplers: list[Any] = [loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
            for one in samplers:
                if hasattr(one, "set_epoch"):
                    # Workers ask for the first samples before Lightning says which epoch it is.
                    one.set_epoch(resumed.epoch)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        num_behind = 0 if resumed is None else resumed.num_batches
        sampler = ResumableSampler(
            getattr(loader, name),
            num_to_skip=lambda: self._num_to_skip(num_behind, length=len(prepared)),
            generator_at_start=generator,
        )
        self._samplers[index] = sampler
        prepared = copy.copy(loader)
        # A `DataLoader` does not let these be set. What workers there are know the old ones.
        vars(prepared).update({name: sampler, "_iterator": None})
        original: Any = type(loader)
        members = {
            "__module__": original.__module__,
            "num_batches_read": property(lambda this: sampler.num_to_skip),
        }
        prepared.__class__ = type(original.__name__, (original,), members)
        return prepared

    def _num_to_skip(self, num_batches: int, *, length: int) -> int:
        """Return how many batches to leave out of a loader that is perhaps shorter than another one beside it."""
        assert self._trainer is not None
        if num_batches <= length:
            return num_batches
        combined: Any = self._trainer.fit_loop._combined_loader
        begins_again = len(self._samplers) > 1 and combined._mode == "max_size_cycle"
        return (num_batches % length or length) if begins_again else length

    def resume(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is None or self._trainer is None:
            return
        num_batches = self._trainer.num_training_batches
        if resumed.is_end_of_epoch and resumed.has_other_ranks and isinstance(num_batches, int):
            shift_counts(self._trainer.fit_loop.epoch_loop.batch_progress, num_processed=num_batches)
        if resumed.num_batches > 0 and self._can_skip:
            warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)
            self._filter = warnings.filters[0]

    def complete_step(self) -> None:
        if self._filter is not None:
            with suppress(ValueError):  # somebody has taken it away
                warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
            self._filter = None
        assert self._trainer is not None
        loop: Any = self._trainer.fit_loop
        # Lightning counts this step later.
        is_counted_later = self._trainer.lightning_module.automatic_optimization
        self._at_step = _Step(
            num_epochs=loop.epoch_progress.current.started,
            num_batches=loop.epoch_loop.batch_progress.current.ready,
            number=self._trainer.global_step + 1 if is_counted_later else None,
        )

    def num_batches_trained(self) -> int | None:
        if not self._can_skip or self._trainer is None:
            return None
        loop: Any = self._trainer.fit_loop
        if self._at_step is None and not self._trainer.lightning_module.automatic_optimization:
            return None  # the optimizer's own `step` is called, and we see none
        last = self._at_step
        if last is None or last.num_epochs != loop.epoch_progress.current.started:
            return 0
        # After the end of an epoch Lightning may begin another one without counting it.
        return last.num_batches if last.num_batches <= loop.epoch_loop.batch_progress.current.ready else 0

    def state(self) -> dict[str, Any] | None:
        if (num_batches := self.num_batches_trained()) is None:
            return None
        assert self._trainer is not None
        generators = [None if sampler is None else sampler.generator_at_start for sampler in self._samplers]
        return {
            "num_batches": num_batches,
            "step": None if self._at_step is None else self._at_step.number,
            "world_size": self._trainer.world_size,
            "generators": generators,
        }


def shift_counts(progress: Any, *, num_processed: int) -> None:
    """Change Lightning's counts of batches so that `num_processed` are processed in the epoch."""
    shift = num_processed - progress.current.processed
    for counts in (progress.total, progress.current):
        for name in _COUNTS:
            setattr(counts, name, getattr(counts, name) + shift)


def _set_counts(batches: dict[str, Any], num_batches: int) -> None:
    """Have Lightning go on after `num_batches` batches of the epoch."""
    total, current = batches["total"], batches["current"]
    # As if saved at the end of the batch that was going on, which Lightning knows from callbacks; else after a batch.
    is_at_end = num_batches > current["processed"] or current["completed"] < current["processed"] == num_batches
    for name in _COUNTS:
        count = num_batches - (is_at_end and name == "completed")
        total[name] += count - current[name]
        current[name] = count


def _set_step(steps: dict[str, Any], number: int | None) -> None:
    """Have Lightning count a step that was taken, but interrupted before it was counted."""
    if number == steps["total"]["completed"] + 1:
        for counts in steps.values():
            counts["completed"] += 1
