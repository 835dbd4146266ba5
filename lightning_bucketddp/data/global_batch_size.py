"""A number of samples per optimizer step that stays, whatever the number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from lightning_bucketddp.data.evaluation import changed_loader
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.processes import rank_zero_info

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@dataclass(frozen=True, slots=True)
class Division:
    """How a global batch is divided: what a rank takes at once, and how often in each step."""

    batch_size: int
    batches_per_step: int


def divide(size: int, *, num_ranks: int, largest: int) -> Division:
    """Return the division of `size` samples with the fewest batches, none with more than `largest` samples."""
    per_rank, rest = divmod(size, num_ranks)
    if rest:
        multiples = [str(multiple) for multiple in (size - rest, size - rest + num_ranks) if multiple > 0]
        raise ValueError(
            f"`global_batch_size` is {size}, which {num_ranks} ranks cannot share evenly. Choose a multiple of"
            f" {num_ranks}, for example {' or '.join(multiples)}."
        )
    fewest = -(-per_rank // largest)
    batches_per_step = next(count for count in range(fewest, per_rank + 1) if per_rank % count == 0)
    return Division(per_rank // batches_per_step, batches_per_step)


@dataclass(eq=False)
class _FirstSamples(Sampler[Any]):
    """The first samples of `sampler`."""

    sampler: Any
    number: int

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.sampler, self.number)

    def __len__(self) -> int:
        return self.number


class StepSampler(BatchSampler):
    """Batches of which `batches_per_step` make an optimizer's step; with `drop_last`, as many as make whole steps."""

    def __init__(self, sampler: Any, division: Division, *, drop_last: bool) -> None:
        if drop_last and hasattr(sampler, "__len__"):
            # Without the samples that a distributed sampler gives twice.
            is_shared = isinstance(sampler, DistributedSampler)
            number = len(sampler.dataset) // sampler.num_replicas if is_shared else len(sampler)
            sampler = _FirstSamples(sampler, number - number % (division.batch_size * division.batches_per_step))
        super().__init__(sampler, division.batch_size, drop_last)
        self._batches_per_step = division.batches_per_step

    def loss_factor(self, index: int, *, num_batches: float, begun: tuple[int, int] = (0, 0)) -> float:
        """Return what makes a loss count by the samples of its batch, so that a step is the mean over its samples.

        Lightning divides each loss by the number of batches of a whole step, and counts a short batch like a full one.
        """
        num_behind, num_before = begun  # samples and batches, when the epoch was resumed
        num_samples = len(self.sampler) - num_behind  # type: ignore[arg-type]

        def size_of(index: int) -> int:
            return min(self.batch_size, num_samples - (index - num_before) * self.batch_size)

        first = index - index % self._batches_per_step
        step = range(max(first, num_before), int(min(first + self._batches_per_step, num_batches)))
        # After its own batches a rank repeats one, with weight zero (`uneven_data`).
        own = [size_of(batch) for batch in step if size_of(batch) > 0]
        if size_of(index) <= 0:
            return 1.0
        return size_of(index) * self._batches_per_step * len(own) / (sum(own) * len(step))


@dataclass(eq=False)
class GlobalBatchSize(RunPart):
    """Sets batch size and accumulation so that `size` samples make an optimizer's step; None: both are the user's.

    It `weighs` the losses of the last step of an epoch, which may be incomplete, if nothing else does; not those of a
    stream, whose length is not known. `begun` is that of `EpochPosition`.
    """

    size: int | None
    weighs: bool
    begun: Callable[[], tuple[int, int]]
    _trainer: Trainer | None = None
    _division: Division | None = None
    _sampler: StepSampler | None = None
    _num_loaders: int = 0

    def begin(self, trainer: Trainer) -> None:
        """Begin a fit."""
        if self.size is None:
            return
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        schedulers = [type(it).__name__ for it in callbacks if hasattr(it, "get_accumulate_grad_batches")]
        if trainer.accumulate_grad_batches != 1 or schedulers:
            found = schedulers[0] if schedulers else f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
            raise ValueError(
                f"`global_batch_size` says how many batches are accumulated, and so does `{found}`. Leave one of them"
                " out."
            )
        divide(self.size, num_ranks=trainer.world_size, largest=self.size)
        self._trainer, self._division = trainer, None

    def end(self) -> None:
        """Leave the Trainer as it was."""
        if self._trainer is not None:
            self._trainer.accumulate_grad_batches = 1
        self._trainer, self._sampler = None, None

    def begin_loaders(self) -> None:
        self._num_loaders = 0

    def prepare_loader(self, loader: Any, *, is_training: bool) -> Any:
        if self.size is None or not is_training:
            return loader
        self._num_loaders += 1
        self._check(loader)
        assert self._trainer is not None  # there is a fit
        num_ranks = self._trainer.world_size
        division = divide(self.size, num_ranks=num_ranks, largest=loader.batch_size)
        if division.batches_per_step > 1 and not self._trainer.lightning_module.automatic_optimization:
            raise ValueError(
                f"With `global_batch_size={self.size}` each of {num_ranks} ranks would accumulate"
                f" {division.batches_per_step} batches of {division.batch_size} samples, but with manual optimization"
                f" that is left to you. Give the `DataLoader` a `batch_size` of {self.size // num_ranks} or more."
            )
        if division != self._division:
            ranks = f"each of {num_ranks} ranks" if num_ranks > 1 else "1 rank"
            count = division.batches_per_step
            accumulated = f", accumulated over {count} batches" if count > 1 else ""
            rank_zero_info(
                f"bucketddp: global batch of {self.size}: {division.batch_size} samples on {ranks}{accumulated}"
            )
        self._division = division
        self._trainer.accumulate_grad_batches = division.batches_per_step
        sampler = StepSampler(loader.sampler, division, drop_last=loader.drop_last)
        self._sampler = sampler if isinstance(loader.sampler, Sized) else None
        return changed_loader(loader, batch_size=division.batch_size, batch_sampler=sampler)

    def _check(self, loader: Any) -> None:
        if not isinstance(loader, DataLoader):
            found = f"a `{type(loader).__name__}`"
        elif self._num_loaders > 1:
            found = "several"
        elif loader.batch_sampler is None:
            found = "one with `batch_size=None`"
        elif loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
            found = f"one with a `{type(loader.batch_sampler).__name__}` of its own"
        else:
            return
        raise ValueError(
            f"`global_batch_size` needs one training `DataLoader` that makes batches by its `batch_size`, and there is"
            f" {found}."
        )

    @property
    def loss_factor(self) -> float:
        if self._sampler is None or not self.weighs:
            return 1.0
        assert self._trainer is not None
        index, num_batches = self._trainer.fit_loop.epoch_loop.batch_idx, self._trainer.num_training_batches
        return self._sampler.loss_factor(index, num_batches=num_batches, begun=self.begun())
