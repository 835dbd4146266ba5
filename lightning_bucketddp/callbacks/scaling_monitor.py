"""`ScalingMonitor`, less its Lightning base class, and the size of the global batch."""

from __future__ import annotations

import math
import time
from collections.abc import Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_bucketddp.processes import rank_zero_info
from lightning_bucketddp.trainer_internals import is_log_step, log_at_once

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Callback
    from lightning.pytorch import LightningModule, Trainer
else:
    _Callback = object

_NAME = "ScalingMonitor"


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples of one optimizer step, over all ranks and accumulated batches."""

    num_ranks: int
    over_ranks: int  # the samples of one batch on every rank, added up
    num_micro_batches: int  # that each rank accumulates

    @classmethod
    def of(cls, trainer: Trainer, *, batch_size_per_rank: int | None, asked_by: str) -> GlobalBatch:
        """Return it for `batch_size_per_rank`, or for the batch size of the training data. A collective."""
        # Of a `DataLoader`, not of a batch sampler: a user's own may call anything its batch size.
        of_loader = getattr(trainer.train_dataloader, "batch_size", None)
        on_this_rank = batch_size_per_rank or (of_loader if isinstance(of_loader, int) else None)
        if on_this_rank is None:
            raise ValueError(
                f"`{asked_by}` cannot tell the batch size of the training data, a"
                f" `{type(trainer.train_dataloader).__name__}`. Pass `batch_size_per_rank`, the samples in one batch of"
                " one rank."
            )
        # A sum, so that all ranks get the same number even if their batches differ.
        summed = trainer.strategy.reduce(
            torch.tensor(on_this_rank, device=trainer.strategy.root_device), reduce_op="sum"
        )
        return cls(trainer.world_size, int(summed), trainer.accumulate_grad_batches)

    @property
    def size(self) -> int:
        return self.over_ranks * self.num_micro_batches

    def __str__(self) -> str:
        per_rank, rest = divmod(self.over_ranks, self.num_ranks)
        ranks = f"{self.over_ranks} on {self.num_ranks} ranks" if rest else f"{self.num_ranks} x {per_rank}"
        return f"global batch {ranks} x {self.num_micro_batches} = {self.size}"


class ScalingMeasurement(_Callback):
    """Logs the global batch size, the samples per second of all ranks together, and how well that scales.

    Measures from one log point of the Trainer to the next, without validation, checkpoints and the start of an epoch.
    Waits for the device there and nowhere else. Epochs of one step have nothing to measure.

    Args:
        single_rank_samples_per_second: What one rank does alone with the same batch size per rank. A run with
            `devices=1` and this callback says it at its end. Without it no efficiency is logged: nothing within a run
            on many ranks tells how fast one of them is alone.
        batch_size_per_rank: Samples in one batch of one rank, where the data does not say.
    """

    def __init__(
        self, *, single_rank_samples_per_second: float | None = None, batch_size_per_rank: int | None = None
    ) -> None:
        if single_rank_samples_per_second is not None and single_rank_samples_per_second <= 0:
            raise ValueError(
                f"`single_rank_samples_per_second` is {single_rank_samples_per_second:g}; it must be more than 0."
            )
        self._single_rank_samples_per_second = single_rank_samples_per_second
        self._batch_size_per_rank = batch_size_per_rank
        self._batch: GlobalBatch | None = None
        self._global_step = 0
        # When consecutive steps with nothing but training between them began, and the samples of all ranks in them.
        self._began_at: float | None = None
        self._new_samples = 0.0
        self._num_samples, self._seconds = 0.0, 0.0  # of all of them

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._find_batch_size(trainer)
        self._global_step = trainer.global_step
        self._num_samples, self._seconds = 0.0, 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._find_batch_size(trainer)  # the data may have been reloaded
        self._began_at = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began_at = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._began_at = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._count(trainer, batch_idx)
        if trainer.global_step == self._global_step:
            return  # still accumulating
        self._global_step = trainer.global_step
        if self._began_at is None:
            self._began_at, self._new_samples = _now(trainer.strategy.root_device), 0.0
        elif is_log_step(trainer):
            self._log(trainer, self._began_at)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._seconds == 0:
            return
        rate = self._num_samples / self._seconds
        if trainer.world_size == 1:
            hint = f" Pass `single_rank_samples_per_second={rate:.6g}` when you train on more ranks."
        else:
            efficiency = self._efficiency(rate, trainer)
            hint = "" if efficiency is None else f" Scaling efficiency {efficiency:.3f}."
        rank_zero_info(f"{_NAME}: {trainer.world_size} rank(s): {rate:.6g} samples per second.{hint}")

    def _find_batch_size(self, trainer: Trainer) -> None:
        self._batch = GlobalBatch.of(trainer, batch_size_per_rank=self._batch_size_per_rank, asked_by=_NAME)

    def _count(self, trainer: Trainer, batch_idx: int) -> None:
        """Add the samples of a batch on all ranks, or stop measuring if they are unknown."""
        assert self._batch is not None
        if self._began_at is None:
            return
        size: float = self._batch.over_ranks
        if trainer.is_last_batch and self._batch_size_per_rank is None:
            in_epoch = _samples_in_epoch(trainer.train_dataloader)
            if in_epoch is None:
                self._began_at = None
                return
            size = min(size, trainer.world_size * in_epoch - batch_idx * size)
        self._new_samples += size

    def _log(self, trainer: Trainer, began_at: float) -> None:
        assert self._batch is not None
        now = _now(trainer.strategy.root_device)
        rate = self._new_samples / (now - began_at)
        size = self._batch.over_ranks * trainer.accumulate_grad_batches
        values = {"bucketddp/global_batch_size": float(size), "bucketddp/samples_per_second": rate}
        if (efficiency := self._efficiency(rate, trainer)) is not None:
            values["bucketddp/scaling_efficiency"] = efficiency
        log_at_once(trainer, values)
        self._num_samples += self._new_samples
        self._seconds += now - began_at
        self._began_at, self._new_samples = now, 0.0

    def _efficiency(self, samples_per_second: float, trainer: Trainer) -> float | None:
        if self._single_rank_samples_per_second is None:
            return None
        return samples_per_second / (trainer.world_size * self._single_rank_samples_per_second)


def _samples_in_epoch(loader: Any) -> float | None:
    """Return the samples of this rank in an epoch: infinite if no batch is short, None if unknown."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if getattr(batch_sampler, "drop_last", False):
        return math.inf
    sampler = getattr(batch_sampler, "sampler", None)
    # The sampler of an iterable dataset has no length.
    return len(sampler) if isinstance(sampler, Sized) else None


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
