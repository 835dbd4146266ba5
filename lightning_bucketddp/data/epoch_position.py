"""Resuming within an epoch: no sample twice, and none left out.

Note: position
    A checkpoint holds how many batches of its epoch went into the weights: those before the last optimizer's step.
    Lightning's own count may be behind, where an exception came after the step and before the batch was over, or ahead,
    where gradients were being accumulated, which are lost. It is corrected when the checkpoint is loaded.

    It also holds how many samples of each dataloader that were. A sampler leaves them out, and so does a sharded
    stream. Most samplers begin an epoch by drawing a seed or an order from one of torch's generators, whose state is
    in the checkpoint, too; but a `DistributedSampler` knows its order by the number of the epoch.

    With another batch size or number of ranks the samples that are left make other batches, and Lightning counts as
    many before them as make the epoch come out right. Each rank takes every n-th sample of an order that does not
    depend on the number of ranks, so the number of samples is divided by n, and the remainder is trained on again.
    Where samplers may give ranks different numbers of samples, they begin with a whole batch, to end together.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler, SequentialSampler

from lightning_bucketddp.data.evaluation import changed_loader, is_even, length_of
from lightning_bucketddp.data.sharded_iterable import is_dealt
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.processes import rank_zero_warn
from lightning_bucketddp.trainer_internals import (
    combined_loader,
    known_metrics,
    logged_steps,
    mark_as_begun,
    mode_of,
    sampler_within,
    saved_progress,
    set_batches,
    set_logged_steps,
)

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# Lightning warns of this for loaders that have no `state_dict`.
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class ResumableSampler(Sampler[Any]):
    """Gives, in each pass, what `sampler` gives between the indices that `next_range` returns."""

    def __init__(
        self, sampler: Any, *, next_range: Callable[[], tuple[int, int | None]], generator_at_start: Tensor | None
    ) -> None:
        self._original = sampler
        self._next_range = next_range
        self._restored = generator_at_start
        self._generator_at_start = generator_at_start  # of the pass; None: there was none, or none is needed
        self._own: torch.Generator | None = None  # of the sampler's

    def generator_state(self, *, is_over: bool) -> Tensor | None:
        """Return the state for a run that repeats the pass, or, if that `is_over`, for one that begins the next."""
        state = None if self._own is None else self._own.get_state()
        return state if is_over else self._generator_at_start

    def __iter__(self) -> Iterator[Any]:
        # Not before its first batch is asked for: a loader with workers makes two iterators, and drops one.
        begin, end = self._next_range()
        restored, self._restored = self._restored, None
        if (drawing := _random_sampler(self._original)) is None:
            yield from islice(self._original, begin, end)
            return
        own = self._own = getattr(drawing, "generator", None)
        generator: torch.Generator = torch.default_generator if own is None else own
        now = generator.get_state()
        if restored is not None:
            generator.set_state(restored)
        self._generator_at_start = generator.get_state()
        samples = islice(self._original, begin, end)
        first = list(islice(samples, 1))  # draws what the sampler draws
        if restored is not None and own is None:
            # Whatever else draws from it goes on where it was.
            generator.set_state(now)
        yield from first
        yield from samples

    def __len__(self) -> int:
        return len(self._original)

    def __getattr__(self, name: str) -> Any:
        if name == "_original" or name.startswith("__"):  # asked for while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self._original, name)


def _random_sampler(sampler: Any) -> Any:
    """Return the sampler whose generator decides what `sampler` gives; None: no generator does."""
    while (inner := getattr(sampler, "sampler", None)) is not None:
        sampler = inner
    if type(sampler) in (DistributedSampler, SequentialSampler):
        return None
    return sampler_within(sampler)


@dataclass(slots=True)
class _LoaderPosition:
    """Where this rank is in one of the training dataloaders (Note: position)."""

    loader: Any
    batch_size: int | None  # how many of what its sampler gives; None: it gives batches of the user's own
    num_samples: float  # in a pass, of a stream on the rank with most; infinite: unknown, or not equal on all ranks
    sampler: ResumableSampler | None = None  # None: it is a stream
    # Where the first pass of this run begins and ends (None: at its end), and how many batches that makes.
    begin: int = 0
    end: int | None = None
    num_batches: float = math.inf
    has_begun: bool = False  # the first pass of this run
    is_first_pass: bool = True  # of the epoch; a loader that is shorter than another begins again

    def take_all(self) -> None:
        """Take all of an epoch."""
        self.begin, self.end, self.num_batches, self.is_first_pass = 0, None, self.length, True

    def take_rest(self, num_behind: int, *, num_batches: float, num_counted: int) -> int:
        """Leave out the first `num_behind` samples of an epoch of `num_batches`; return how many batches they make.

        They made `num_counted` batches, maybe of another size. At least one batch is left, to end the epoch with.
        """
        size, length = self.batch_size or 1, self.length
        if math.inf in (self.num_samples, num_batches):
            num_before = num_behind // size
            if num_before != num_counted and num_batches != math.inf:
                num_before = min(num_before, int(min(length, num_batches)) - 1)
            self.begin = num_behind if self.sampler is None else num_before * size
            self.num_batches = max(length - num_before, 0)
            return num_before
        self.end = int(min(self.num_samples, num_batches * size) if num_batches < length else self.num_samples)
        num_left = self._num_batches_of(self.end - num_behind)
        self.begin, self.num_batches = (num_behind, num_left) if num_left > 0 else (max(self.end - size, 0), 1)
        return int(num_batches - self.num_batches)

    def state(self, num_batches: int, *, cycles: bool) -> dict[str, Any]:
        """Return where it is after `num_batches` of this run in this epoch."""
        size, length = self.batch_size or 1, self.length
        num_behind = self.begin + num_batches * size
        if cycles and num_batches > self.num_batches:
            num_behind = int((num_batches - self.num_batches) % length or length) * size
        is_first = self.is_first_pass and num_batches < self.num_batches
        return {"num_samples": num_behind, "is_first_pass": is_first, "own_batches": self.own_batches}

    @property
    def length(self) -> float:
        """The number of batches in a pass, of a stream on the rank with most."""
        if self.sampler is not None or self.num_samples == math.inf:
            return length_of(self.loader)
        return self._num_batches_of(int(self.num_samples))

    def _num_batches_of(self, num_samples: int) -> int:
        size, drops_last = self.batch_size or 1, getattr(self.loader.batch_sampler, "drop_last", False)
        return (num_samples + (0 if drops_last else size - 1)) // size

    @property
    def own_batches(self) -> list[Any] | None:
        """Size and number of batches of the user's own; None: there are none."""
        size = getattr(self.loader.batch_sampler, "batch_size", None)
        return [size, length_of(self.loader)] if self.batch_size is None else None


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of an optimizer: how many epochs were begun then, how many batches of the last, and steps in all."""

    num_epochs: int
    num_batches: int
    number: int | None
    num_logged: int  # steps as loggers count them, with this one


@dataclass(frozen=True, slots=True)
class _Resumed:
    """What a resumed run has behind it (Note: position)."""

    epoch: int
    num_batches: int
    is_end_of_epoch: bool
    # By interval, and whether they follow a metric: after which batch or epoch schedules had a step left to take.
    schedules_due: dict[tuple[str, bool], int]
    saved: dict[str, Any]

    @property
    def is_within_epoch(self) -> bool:
        """Whether samples of an epoch that is not over are in the weights."""
        has_samples = any(loader["num_samples"] for loader in self.saved["loaders"])
        return not self.is_end_of_epoch and (self.num_batches > 0 or has_samples)


class EpochPosition(RunPart):
    """Counts the batches of an epoch that are in the weights (Note: position); unless `is_on`, Lightning does."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._trainer: Any = None  # a `Trainer`, once a fit has begun
        self._at_step: _Step | None = None
        self._resumed: _Resumed | None = None
        self._num_logged: int | None = None  # until the first batch of a resumed run: Lightning may be wrong by one
        self._loaders: list[_LoaderPosition] = []
        # The number of the epoch that is resumed, and how many of its batches come before the first of this run.
        self._resumed_epoch: int | None = None
        self._num_before: int | None = None
        self._can_skip = is_on
        self._filter: Any = None

    def begin(self, trainer: Trainer) -> None:
        """Begin a fit."""
        self._trainer = trainer

    def forget_checkpoint(self) -> None:
        """Forget the checkpoint that was loaded: no training has begun with it."""
        self._resumed = None

    def take_from(self, checkpoint: dict[str, Any], trainer: Trainer) -> None:
        """Correct the counts in `checkpoint` for the training that begins with it."""
        saved = checkpoint.get("bucketddp", {}).get("position")
        progress = saved_progress(checkpoint)
        if not self._is_on or trainer.state.fn != "fit" or saved is None or progress is None:
            return
        epochs, batches, num_batches = progress.epochs["current"], progress.batches, saved["num_batches"]
        is_end = batches["is_last_batch"] = batches["is_last_batch"] and num_batches == batches["current"]["ready"]
        has_stepped_alone = batches["current"]["processed"] < num_batches  # without the schedules: an exception came
        # Those that follow a metric: after `on_train_epoch_end`, in which a `ModelCheckpoint` may save.
        is_epoch_ending = epochs["completed"] < epochs["processed"] == epochs["started"]
        progress.set_batches(num_batches)
        if saved["step"] == progress.optimizer_steps["total"]["completed"] + 1:  # taken, but not counted
            for counts in progress.optimizer_steps.values():
                counts["completed"] += 1
        is_counted = epochs["started"] == epochs["processed"]
        is_over = is_end and (is_counted or batches["current"]["completed"] < num_batches)  # or a validation is left
        progress.begin_epochs(is_over=is_over)
        self._num_logged = saved["num_logged"]
        self._at_step = _Step(epochs["started"], num_batches, saved["step"], saved["num_logged"])
        self._resumed_epoch = None if is_end else epochs["started"]
        epoch = epochs["processed"] + (is_end and not is_over)
        due = {("step", False): num_batches, ("epoch", False): epoch if is_end else 0} if has_stepped_alone else {}
        due |= {("epoch", True): epoch} if is_epoch_ending else {}
        self._resumed = _Resumed(epoch, 0 if is_end else num_batches, is_end, due, saved)

    def begin_loaders(self) -> None:
        self._loaders, self._num_before, self._can_skip = [], None, self._is_on

    def prepare_loader(self, loader: Any, *, is_training: bool) -> Any:
        if not self._can_skip or not is_training:
            return loader
        is_stream = is_dealt(loader)
        has_samples = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if hasattr(loader, "load_state_dict") or not (is_stream or has_samples):
            self._can_skip = False
            return loader
        return self._with_range(loader) if is_stream else self._with_sampler(loader)

    def _with_range(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader of a sharded stream that leaves out what was trained on."""
        iterate, num_ranks = type(loader).__iter__, self._trainer.world_size
        total: Any = length_of(loader.dataset.dataset)  # type: ignore[attr-defined]
        # The most that a rank has, because ranks with fewer may have to go on for as long (`uneven_data`).
        num_samples = total if total == math.inf else -(-total // num_ranks)
        position = _LoaderPosition(loader, loader.batch_size or 1, num_samples)

        def iterate_range(this: Any) -> Iterator[Any]:
            this.dataset.num_read = self._next_range(position)[0] * num_ranks
            return iterate(this)

        return self._prepared(position, {"__iter__": iterate_range})

    def _with_sampler(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader whose sampler leaves out what was trained on."""
        batches, num_ranks = cast(Any, loader.batch_sampler), self._trainer.world_size
        has_own_batches = batches is not None and type(batches).__iter__ is not BatchSampler.__iter__
        original: Any = loader.sampler if batches is None else batches if has_own_batches else batches.sampler
        are_even = num_ranks == 1 or is_even(loader)
        batch_size = None if has_own_batches else getattr(batches, "batch_size", 1)
        num_samples = length_of(original) if are_even and not has_own_batches else math.inf
        position = _LoaderPosition(loader, batch_size, num_samples)
        generator = None
        if (resumed := self._resumed) is not None:
            # After a failure there is only the state of the rank that has saved.
            by_rank = resumed.saved["generators"]
            generators = by_rank[self._trainer.global_rank if len(by_rank) == num_ranks else 0]
            is_order_known = are_even or num_ranks == resumed.saved["world_size"]
            if len(self._loaders) < len(generators) and is_order_known:
                generator = generators[len(self._loaders)]
            for one in (loader.sampler, getattr(batches, "sampler", None)):
                # Workers ask for the first samples before Lightning says which epoch it is.
                getattr(one, "set_epoch", lambda epoch: None)(resumed.epoch)
        replaced = position.sampler = ResumableSampler(
            original, next_range=lambda: self._next_range(position), generator_at_start=generator
        )
        if batches is not None and not has_own_batches:
            replaced = copy.copy(batches)
            replaced.sampler = position.sampler
        return self._prepared(position, {}, **{"sampler" if batches is None else "batch_sampler": replaced})

    def _prepared(self, position: _LoaderPosition, members: dict[str, Any], **attributes: Any) -> DataLoader[Any]:
        self._loaders.append(position)
        num_read = property(lambda _: 0 if position.has_begun else self._place_loaders())
        members = {"num_batches_read": num_read, **members}
        return cast("DataLoader[Any]", changed_loader(position.loader, members, **attributes))

    def _next_range(self, position: _LoaderPosition) -> tuple[int, int | None]:
        """Return where the next pass of a loader begins and ends."""
        if position.has_begun:
            return 0, None
        self._place_loaders()
        position.has_begun = True
        return position.begin, position.end

    def _place_loaders(self) -> int:
        """Decide, once their limits are known, what the loaders give first; return how many batches come before."""
        if self._num_before is None:
            resumed, combined = self._resumed, combined_loader(self._trainer.fit_loop)
            lengths = [min(length_of(it), limit) for it, limit in zip(combined.flattened, combined.limits, strict=True)]
            ends_with_first = mode_of(combined) == "min_size"
            num_batches = min(lengths) if ends_with_first else max(lengths)
            num_before = []
            for index, position in enumerate(self._loaders):
                if resumed is None or not resumed.is_within_epoch:
                    position.take_all()
                    continue
                num_behind, position.is_first_pass = self._num_behind(index, resumed)
                most = num_batches if position.is_first_pass else math.inf
                left_out = position.take_rest(num_behind, num_batches=most, num_counted=resumed.num_batches)
                num_before += [left_out] if position.is_first_pass else []
            default = 0 if resumed is None else resumed.num_batches
            self._num_before = max(num_before, default=default) if ends_with_first else min(num_before, default=default)
        return self._num_before

    def _num_behind(self, index: int, resumed: _Resumed) -> tuple[int, bool]:
        """Return how many samples of a loader are in the weights, and whether they are of its first pass."""
        position, num_ranks, num_before = self._loaders[index], self._trainer.world_size, resumed.saved["world_size"]
        saved = dict(enumerate(resumed.saved["loaders"])).get(index)
        is_of_other_ranks = position.num_samples == math.inf and position.sampler and num_before != num_ranks
        if saved is None or saved["own_batches"] != position.own_batches or is_of_other_ranks:
            rank_zero_warn(
                "bucketddp: the data of this epoch begins again. Which samples are in the weights is not known: each"
                " rank has samples, or batches, of its own, and had others when the checkpoint was saved."
            )
            return 0, True
        return saved["num_samples"] * num_before // num_ranks, saved["is_first_pass"]

    def begin_training(self) -> None:
        resumed = self._resumed
        if resumed is None or self._trainer is None:
            return
        # A `GradientAccumulationScheduler` does this in `on_train_epoch_start`, which Lightning skips in this epoch.
        for callback in self._trainer.callbacks:
            if hasattr(callback, "get_accumulate_grad_batches"):
                self._trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(resumed.epoch)
        if self._can_skip:
            num_before = self._place_loaders()
            epochs = self._trainer.fit_loop.epoch_progress.current
            is_over = resumed.is_end_of_epoch and epochs.completed == epochs.ready  # these are batches of the next one
            if resumed.is_end_of_epoch and self._trainer.num_training_batches != math.inf:
                num_before = int(self._trainer.num_training_batches)
            if self._at_step is not None and not is_over and (not resumed.is_end_of_epoch or num_before > 0):
                self._at_step = replace(self._at_step, num_batches=num_before)
                set_batches(self._trainer, num_before)
        self._resumed = None
        self._continue_schedules(resumed, resumed.saved["metrics"])
        if resumed.is_within_epoch and self._can_skip:
            warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)
            self._filter = warnings.filters[0]

    def _continue_schedules(self, resumed: _Resumed, metrics: dict[str, float]) -> None:
        """Have schedules take the steps that were due, and at the end of this epoch: Lightning leaves that out."""
        trainer, module = self._trainer, self._trainer.lightning_module
        known_metrics(trainer).update({name: torch.tensor(it) for name, it in metrics.items()})
        followed = {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
        mark_as_begun(trainer, lacks_metrics=resumed.is_end_of_epoch and not followed <= metrics.keys())
        for config in trainer.lr_scheduler_configs if module.automatic_optimization else ():
            number = resumed.schedules_due.get((config.interval, config.reduce_on_plateau))
            has_metric = config.monitor in metrics or not config.reduce_on_plateau
            if number and number % config.frequency == 0 and has_metric:
                module.lr_scheduler_step(config.scheduler, metrics.get(config.monitor))

    def begin_batch(self, batch_idx: int) -> None:
        if self._num_logged is not None:
            set_logged_steps(self._trainer, self._num_logged)
            self._num_logged = None

    def begun(self) -> tuple[int, int]:
        """Return after how many samples, and how many batches, of its epoch this run goes on."""
        is_resumed = self._loaders and self._resumed_epoch == self._num_epochs_begun()
        return (self._loaders[0].begin, self._place_loaders()) if is_resumed else (0, 0)

    def _num_epochs_begun(self) -> int:
        return int(self._trainer.fit_loop.epoch_progress.current.started)

    def complete_step(self) -> None:
        if self._filter in warnings.filters:  # other code may have removed it
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
        is_automatic = self._trainer.lightning_module.automatic_optimization
        self._at_step = _Step(
            num_epochs=self._num_epochs_begun(),
            num_batches=self._trainer.fit_loop.epoch_loop.batch_progress.current.ready,
            number=self._trainer.global_step + 1 if is_automatic else None,  # Lightning counts it later
            num_logged=logged_steps(self._trainer) + 1,
        )

    def num_batches_trained(self) -> int | None:
        """Return how many batches of the epoch are in the weights; None: Lightning's count is valid."""
        if not self._can_skip or self._trainer is None or self._resumed is not None:
            return None
        last = self._at_step
        if last is None and not self._trainer.lightning_module.automatic_optimization:
            return None  # the user calls the optimizer's own `step`, which is not noticed
        return 0 if last is None or last.num_epochs != self._num_epochs_begun() else last.num_batches

    def state(self) -> dict[str, Any] | None:
        """Return what goes into a checkpoint; `generators` of every rank, by rank."""
        if (num_batches := self.num_batches_trained()) is None:
            return None
        if self._num_epochs_begun() != self._resumed_epoch:
            self._num_before = 0
            for position in self._loaders:
                position.take_all()
        trainer, loop = self._trainer, self._trainer.fit_loop
        cycles = len(self._loaders) > 1 and mode_of(combined_loader(loop)) == "max_size_cycle"
        num_own = num_batches - self._place_loaders()
        batches, epochs = loop.epoch_loop.batch_progress, loop.epoch_progress.current
        is_over = batches.is_last_batch and num_batches == batches.current.ready
        monitors = {it.monitor for it in trainer.lr_scheduler_configs if it.reduce_on_plateau}
        # At the end of an epoch its means may not be computed yet, for which ranks need each other.
        computes = monitors and epochs.processed > epochs.completed and not trainer.interrupted
        known = trainer.callback_metrics if computes else known_metrics(trainer)
        return {
            "num_batches": num_batches,
            "step": None if self._at_step is None else self._at_step.number,
            "num_logged": logged_steps(trainer) if self._at_step is None else self._at_step.num_logged,
            "world_size": trainer.world_size,
            "generators": [one.sampler and one.sampler.generator_state(is_over=is_over) for one in self._loaders],
            "loaders": [position.state(num_own, cycles=cycles) for position in self._loaders],
            "metrics": {name: float(known[name]) for name in monitors if name in known},
        }
