"""Parts of a run that keep replicas alike: shared buffers, comparisons, synchronised layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.reducer.observer import ReducerStats
from lightning_bucketddp.replicas.consistency import ReplicaComparison, TrainingState
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.replicas.sync_batchnorm import convert_sync_batchnorm, revert_sync_batchnorm, set_idle


class BufferSync(RunPart):
    """Gives the ranks rank 0's buffers before something reads them.

    Args:
        stats: what the reducer has done since; None if nothing trains.
        once: only before the first forward, and when training ends. So it is under `ddp` with manual optimization:
            Lightning has torch DDP take no forward for one that a synchronised backward follows.
    """

    def __init__(self, replicas: Replicas, stats: ReducerStats | None, *, once: bool) -> None:
        self._replicas = replicas
        self._stats = stats
        self._once = once
        self._num_backwards_shared = -1
        self._validation_has_begun = False

    def before_forward(self) -> None:
        # Before the first forward after a synchronised backward, as torch DDP does.
        if self._stats is not None and self._num_backwards_shared != self._stats.num_backwards:
            self.before_evaluation()

    def before_evaluation(self) -> None:
        if self._once and self._num_backwards_shared >= 0:
            return
        if self._stats is not None:
            self._num_backwards_shared = self._stats.num_backwards
        self._replicas.broadcast_buffers()

    def begin_validation(self) -> None:
        # As torch DDP does: until its first step callbacks exchange weights and statistics.
        self._validation_has_begun = True

    def before_validation_step(self) -> None:
        if self._validation_has_begun:
            self._validation_has_begun = False
            self.before_evaluation()

    def end_training(self) -> None:
        self._num_backwards_shared = -1
        self.before_evaluation()

    def shared_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that are equal on all ranks now, by name."""
        if self._once:
            return {}
        self.before_forward()
        return self._replicas.buffers()


class ScheduledComparison(RunPart):
    """Compares replicas: when training begins and ends, between steps, and before each checkpoint.

    Args:
        trained_state: what training changes in the same way on every rank.
        shared_state: that and the buffers.
    """

    def __init__(
        self,
        checks: ReplicaComparison,
        *,
        trained_state: Callable[[], TrainingState],
        shared_state: Callable[[], TrainingState],
        stats: ReducerStats,
    ) -> None:
        self._checks = checks
        self._trained_state = trained_state
        self._shared_state = shared_state
        self._stats = stats

    def begin_training(self) -> None:
        if self._checks.are_periodic:
            self.compare(when="before the first step")

    def begin_batch(self, batch_idx: int) -> None:
        self._checks.between_steps(self._shared_state, num_backwards=self._stats.num_backwards)

    def compare(self, *, when: str) -> bool:
        return self._checks.compare(self._trained_state, when=when)

    def end_training(self) -> None:
        if self._checks.are_periodic:
            self.compare(when="at the end of training")


class ConvertedLayers(RunPart):
    """What `Trainer(sync_batchnorm=True)` does to a model, on CPU too. `is_idle`: this rank's batches do not count."""

    def __init__(self, collectives: Collectives, *, is_idle: Callable[[], bool]) -> None:
        self._collectives = collectives
        self._is_idle = is_idle
        self._was_idle = False
        self._model = nn.Module()

    def apply(self, model: nn.Module) -> nn.Module:
        """Synchronise the layers."""
        convert_sync_batchnorm(model, self._collectives)
        self._model = model
        return model

    def begin_batch(self, batch_idx: int) -> None:
        if (is_idle := self._is_idle()) != self._was_idle:
            set_idle(self._model, is_idle)
            self._was_idle = is_idle

    def revert(self, model: nn.Module) -> nn.Module:
        """Undo `apply`."""
        revert_sync_batchnorm(model)
        return model
