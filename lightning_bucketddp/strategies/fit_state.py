"""What a run of the Trainer has on this rank, in one object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import StepExchange
from lightning_bucketddp.data.first_batches import NoFirstBatches
from lightning_bucketddp.data.sharded_iterable import NoSharding
from lightning_bucketddp.local_steps.islands import Islands
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.reducer.shards import Shards
from lightning_bucketddp.reducer.stats import ReducerStats
from lightning_bucketddp.replicas.consistency import NoReplicaChecks
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.replicas.sync_batchnorm import convert_sync_batchnorm, revert_sync_batchnorm, set_idle
from lightning_bucketddp.strategies.batch_weighting import EqualBatches
from lightning_bucketddp.strategies.exact_evaluation import ExactEvaluation
from lightning_bucketddp.strategies.local_steps import NoLocalSteps
from lightning_bucketddp.strategies.run_lines import FitTally
from lightning_bucketddp.strategies.unfinished_batch import UnfinishedBatch

if TYPE_CHECKING:
    from lightning.pytorch.plugins.layer_sync import LayerSync


class NoBufferSync:
    """Every rank keeps its own buffers."""

    def before_training_step(self) -> None:
        """Share the buffers before the first forward after a synchronised backward, as torch DDP does."""

    def before_evaluation(self) -> None:
        """Share the buffers."""

    def begin_validation(self) -> None:
        """Wait for its first step, as torch DDP does: until then callbacks exchange weights and statistics."""

    def before_validation_step(self) -> None:
        """Share before the first step of a validation."""

    def shared_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that are equal on all ranks now, by name."""
        return {}


class BufferSync(NoBufferSync):
    """Gives the ranks rank 0's buffers before something reads them.

    Args:
        stats: what the reducer has done since; None if nothing trains.
    """

    def __init__(self, replicas: Replicas, stats: ReducerStats | None) -> None:
        self._replicas = replicas
        self._stats = stats
        self._num_backwards_shared = -1
        self._validation_has_begun = False

    def before_training_step(self) -> None:
        if self._stats is not None and self._num_backwards_shared != self._stats.num_backwards:
            self._num_backwards_shared = self._stats.num_backwards
            self._replicas.broadcast_buffers()

    def before_evaluation(self) -> None:
        if self._stats is not None:
            self._num_backwards_shared = self._stats.num_backwards
        self._replicas.broadcast_buffers()

    def begin_validation(self) -> None:
        self._validation_has_begun = True

    def before_validation_step(self) -> None:
        if self._validation_has_begun:
            self._validation_has_begun = False
            self.before_evaluation()

    def shared_buffers(self) -> dict[str, torch.Tensor]:
        self.before_training_step()
        return self._replicas.buffers()


class NoLayerSync:
    """No layer talks to other ranks."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Synchronise the layers."""
        return model

    def set_idle(self, model: nn.Module, is_idle: bool) -> None:
        """Say whether this rank's batches count."""

    def revert(self, model: nn.Module) -> nn.Module:
        """Undo `apply`."""
        return model


class ConvertedLayers(NoLayerSync):
    """What `Trainer(sync_batchnorm=True)` does to a model, on CPU too."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._is_idle = False

    def apply(self, model: nn.Module) -> nn.Module:
        convert_sync_batchnorm(model, self._collectives)
        return model

    def set_idle(self, model: nn.Module, is_idle: bool) -> None:
        if is_idle != self._is_idle:
            set_idle(model, is_idle)
            self._is_idle = is_idle

    def revert(self, model: nn.Module) -> nn.Module:
        revert_sync_batchnorm(model)
        return model


class LayersOfPlugin(NoLayerSync):
    """What a `LayerSync` plugin of the user does to a model."""

    def __init__(self, plugin: LayerSync) -> None:
        self._plugin = plugin

    def apply(self, model: nn.Module) -> nn.Module:
        return self._plugin.apply(model)

    def revert(self, model: nn.Module) -> nn.Module:
        return self._plugin.revert(model)


@dataclass(slots=True)
class FitState:
    """All that is made in `setup` and closed in `teardown`; what is switched off is an object that does nothing.

    It is held until the next `setup`: a checkpoint may be saved after the fit, and `strategy.reducer` tells of it.

    Attributes:
        is_fit: or else an evaluation.
        replicas: the module's parameters and buffers; None: no module was set up.
        reducer: averages gradients; None: nothing was trained.
        shards: the optimizers whose state is divided; None: it is not.
        exchange: tells the other ranks where this one is; None: there are no others, and no weights.
        weighting: how much each batch counts.
        buffers: when the ranks get rank 0's.
        layers: those that are synchronised between ranks.
        checks: compare the replicas.
        evaluation: which samples this rank evaluates; None: it is alone.
        first_batches: compares the ranks' training data.
        sharding: gives each rank its part of a stream.
        islands: the ranks that take each step together; None: all of them do.
        local_steps: ends rounds of steps that islands take without the others.
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
    weighting: EqualBatches = field(default_factory=EqualBatches)
    buffers: NoBufferSync = field(default_factory=NoBufferSync)
    layers: NoLayerSync = field(default_factory=NoLayerSync)
    checks: NoReplicaChecks = field(default_factory=NoReplicaChecks)
    evaluation: ExactEvaluation | None = None
    first_batches: NoFirstBatches = field(default_factory=NoFirstBatches)
    sharding: NoSharding = field(default_factory=NoSharding)
    islands: Islands | None = None
    local_steps: NoLocalSteps = field(default_factory=NoLocalSteps)
    has_told_own_gradients: bool = False
    unfinished: UnfinishedBatch = field(default_factory=UnfinishedBatch)
    tally: FitTally | None = None
    done: list[str] = field(default_factory=list)

    def close(self, model: nn.Module | None) -> nn.Module | None:
        """Take hooks and conversions off `model`, and return it."""
        if self.reducer is not None:
            self.reducer.close()
        if self.shards is not None:
            self.shards.release_gradients()
        if self.evaluation is not None:
            self.evaluation.close()
        layers, self.layers = self.layers, NoLayerSync()
        return model if model is None else layers.revert(model)

    def end_exchange(self) -> bool:
        """Exchange no more; return whether there was an exchange and its connections may be closed."""
        exchange, self.exchange = self.exchange, None
        self.weighting = EqualBatches()
        are_quiet = [self.local_steps.close(), exchange is None or exchange.close()]
        return (exchange is not None or self.islands is not None) and all(are_quiet)
