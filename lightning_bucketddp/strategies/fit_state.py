"""What a run of the Trainer has on this rank, in one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import StepExchange
from lightning_bucketddp.data.first_batches import FirstBatches
from lightning_bucketddp.data.sharded_iterable import IterableSharding
from lightning_bucketddp.data.uneven_data import UnevenData
from lightning_bucketddp.faults.progress import Progress
from lightning_bucketddp.faults.signals import StopSignals
from lightning_bucketddp.graphs.captured_steps import CapturedSteps
from lightning_bucketddp.local_steps.islands import Islands
from lightning_bucketddp.local_steps.rounds import LocalRounds
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.reducer.observer import ReducerStats
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.consistency import ReplicaComparison, TrainingState
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.replicas.sync_batchnorm import convert_sync_batchnorm, revert_sync_batchnorm, set_idle
from lightning_bucketddp.sharding.shards import Shards
from lightning_bucketddp.strategies.batch_weighting import BatchWeighting
from lightning_bucketddp.strategies.exact_evaluation import ExactEvaluation
from lightning_bucketddp.strategies.options import StrategyOptions
from lightning_bucketddp.strategies.recording import FitTally
from lightning_bucketddp.strategies.unfinished_batch import UnfinishedBatch

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.layer_sync import LayerSync


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
        num_backwards: how many were synchronised.
    """

    def __init__(
        self,
        checks: ReplicaComparison,
        *,
        trained_state: Callable[[], TrainingState],
        shared_state: Callable[[], TrainingState],
        num_backwards: Callable[[], int],
    ) -> None:
        self._checks = checks
        self._trained_state = trained_state
        self._shared_state = shared_state
        self._num_backwards = num_backwards

    def begin_training(self) -> None:
        if self._checks.are_periodic:
            self.compare(when="before the first step")

    def begin_batch(self, batch_idx: int) -> None:
        self._checks.between_steps(self._shared_state, num_backwards=self._num_backwards())

    def compare(self, *, when: str) -> bool:
        return self._checks.compare(self._trained_state, when=when)

    def end_training(self) -> None:
        if self._checks.are_periodic:
            self.compare(when="at the end of training")


class ConvertedLayers(RunPart):
    """What `Trainer(sync_batchnorm=True)` does to a model, on CPU too.

    Args:
        is_idle: whether this rank's batches do not count.
    """

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


class LayersOfPlugin(RunPart):
    """What a `LayerSync` plugin of the user does to a model."""

    def __init__(self, plugin: LayerSync) -> None:
        self._plugin = plugin

    def apply(self, model: nn.Module) -> nn.Module:
        """Synchronise the layers."""
        return self._plugin.apply(model)

    def revert(self, model: nn.Module) -> nn.Module:
        """Undo `apply`."""
        return self._plugin.revert(model)


@dataclass(slots=True)
class FitState:
    """All that is made in `setup` and closed in `teardown`; what is switched off is None.

    It is held until the next `setup`: a checkpoint may be saved after the fit, and `strategy.reducer` tells of it.

    Attributes:
        is_fit: or else an evaluation.
        replicas: the module's parameters and buffers; None: no module was set up.
        reducer: averages gradients; None: nothing was trained.
        shards: the optimizers whose state is divided; None: it is not.
        exchange: tells the other ranks where this one is; None: there are no others, and no weights.
        weighting: how much each batch counts; None: nothing is trained.
        buffers: when the ranks get rank 0's.
        layers: those that are synchronised between ranks.
        comparison: of the replicas.
        evaluation: which samples this rank evaluates; None: it is alone.
        first_batches: compares the ranks' training data.
        sharding: gives each rank its part of a stream.
        islands: the ranks that take each step together; None: all of them do.
        local_steps: ends rounds of steps that islands take without the others.
        graphs: captures steps, and replays them.
        has_told_own_gradients: the user knows of steps with gradients that were not averaged.
        unfinished: what a batch changes before its step.
        tally: counts what is done; None: training has not begun.
        done: what the log will say about that when all is over.
    """

    is_fit: bool = False
    replicas: Replicas | None = None
    reducer: Reducer | None = None
    shards: Shards | None = None
    exchange: StepExchange | None = None
    weighting: BatchWeighting | None = None
    buffers: BufferSync | None = None
    layers: ConvertedLayers | LayersOfPlugin | None = None
    comparison: ScheduledComparison | None = None
    evaluation: ExactEvaluation | None = None
    first_batches: FirstBatches | None = None
    sharding: IterableSharding | None = None
    islands: Islands | None = None
    local_steps: LocalRounds | None = None
    graphs: CapturedSteps | None = None
    has_told_own_gradients: bool = False
    unfinished: UnfinishedBatch | None = None
    tally: FitTally | None = None
    done: list[str] = field(default_factory=list)

    def close(self, model: nn.Module | None) -> nn.Module | None:
        """Take hooks and conversions off `model`, and return it."""
        if self.graphs is not None:
            self.graphs.close()
        if self.reducer is not None:
            self.reducer.close()
        if self.shards is not None:
            self.shards.release_gradients()
        if self.evaluation is not None:
            self.evaluation.close()
        layers, self.layers = self.layers, None
        return model if model is None or layers is None else layers.revert(model)

    def end_exchange(self) -> bool:
        """Exchange no more; return whether there was an exchange and its connections may be closed."""
        exchange, self.exchange = self.exchange, None
        self.weighting = None
        are_quiet = [self.local_steps is None or self.local_steps.close(), exchange is None or exchange.close()]
        return (exchange is not None or self.islands is not None) and all(are_quiet)


def begin_local_steps(
    state: FitState,
    trainer: Trainer,
    islands: Islands,
    options: StrategyOptions,
    *,
    progress: Progress,
    signals: StopSignals | None,
    has_alert: Callable[[], bool],
    callback: type,
) -> None:
    """Have the ranks of an island wait for each other in each step, and all ranks when a round ends.

    Args:
        has_alert: something has gone wrong that all ranks have to hear of.
        callback: the Trainer's class of callbacks.
    """
    assert options.local_steps is not None
    state.islands = islands
    exchange = StepExchange(islands.world, has_alert=has_alert)
    uneven_data = None
    if islands.own.world_size > 1 or options.uneven_data:
        state.exchange = StepExchange(islands.own)
        asks_every = options.local_steps.steps * trainer.accumulate_grad_batches
        uneven_data = UnevenData(exchange, extends=True, asks_every=asks_every) if options.uneven_data else None
    state.weighting = weighting = BatchWeighting(
        trainer,
        state.exchange,
        islands.own,
        extends_uneven_data=options.uneven_data,
        uneven_data=uneven_data,
    )
    state.local_steps = local_steps = LocalRounds(
        trainer,
        islands,
        options.local_steps,
        config=options.reducer,
        replica_checks=options.replica_checks,
        shares_buffers=options.broadcast_buffers,
        exchange=exchange,
        of_island=state.exchange,
        progress=progress,
        signals=signals,
        has_trained=lambda: not weighting.nobody_trained,
    )
    local_steps.install(callback)
    if signals is not None:
        signals.travel_with(exchange)
