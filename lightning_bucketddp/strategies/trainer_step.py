"""What happens in the steps of a fit, of a `BucketDDPStrategy` for the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.optim import Optimizer

from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.faults.progress import OPTIMIZER
from lightning_bucketddp.reducer.graphs import graphs_split
from lightning_bucketddp.reducer.nonfinite import Finiteness
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.consistency import ReplicaCheckConfig, ReplicaChecks, training_state
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.replicas.training_state import TrainingState
from lightning_bucketddp.strategies.batch_weighting import BatchWeighting
from lightning_bucketddp.strategies.fault_handling import HandlesFaults
from lightning_bucketddp.strategies.nonfinite_step import scaler_of, step_unless_withheld
from lightning_bucketddp.strategies.shared_buffers import SharedBuffers
from lightning_bucketddp.strategies.signals import StopSignals
from lightning_bucketddp.strategies.synced_layers import SyncedLayers

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import DDPStrategy as _ParallelStrategy
else:
    _ParallelStrategy = object


class TrainingHooks(HandlesFaults, _ParallelStrategy):
    """The part of a strategy that Lightning calls for each batch, from fetching it to the optimizer's step."""

    config: ReducerConfig
    # Made when a fit is set up, and gone after it.
    reducer: Reducer | None
    _replicas: Replicas | None
    _buffers: SharedBuffers | None
    _weighting: BatchWeighting | None
    _synced_layers: SyncedLayers | None
    _model_averager: Any
    _checks: ReplicaChecks | None
    _check_config: ReplicaCheckConfig
    _is_fitting: bool
    _ddp_comm_state: object

    # Lightning's base class of callbacks.
    _callback: ClassVar[type]

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None  # there is one as long as there is a run
        return self.lightning_module

    def _active_reducers(self) -> list[Reducer]:
        return [] if self.reducer is None else [self.reducer]

    @property
    def _signals(self) -> StopSignals | None:
        return None if self._fault_handler is None else self._fault_handler.signals

    def _make_finiteness(self, replicas: Replicas) -> Finiteness:
        def where() -> str:
            trainer = self._module.trainer
            return f"step {trainer.global_step} (epoch {trainer.current_epoch}, batch {trainer.fit_loop.batch_idx})"

        return Finiteness(replicas, self.config, where=where, has_scaler=scaler_of(self.precision_plugin) is not None)

    def _make_checks(self) -> ReplicaChecks | None:
        """None where nothing is trained, where there is one replica, and where they differ by design."""
        assert self._collectives is not None
        is_local = isinstance(self._ddp_comm_state, PostLocalSGDState)
        if not self._is_fitting or self._weighting is None or self._collectives.world_size == 1 or is_local:
            return None
        return ReplicaChecks(
            self._collectives, self._check_config, exchange=self._weighting.exchange, has_messages=True
        )

    def process_dataloader(self, dataloader: object) -> object:
        if self._weighting is None or not self._module.trainer.training:
            return dataloader
        return self._weighting.prepare(dataloader)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._weighting is not None and self._module.trainer.training:
            self._weighting.see(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._progress.epoch, self._progress.batch = self._module.current_epoch, batch_idx
        self._progress.enter("start")
        # Layers may have been added or replaced between epochs. Looking costs more than a step of a small model.
        if batch_idx == 0 and self._replicas is not None and self._replicas.are_outdated(self._module):
            self._setup_model(self._module)
        if self._weighting is not None:
            self._weighting.begin_batch(batch_idx)
            if self._synced_layers is not None:
                self._synced_layers.set_idle(self._module, self._weighting.is_idle)
        if self._checks is not None:
            assert self.reducer is not None
            self._checks.between_steps(self._shared_state, num_backwards=self.reducer.stats.num_backwards)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._progress.enter("forward")
        if self._buffers is not None:
            self._buffers.before_training_step()
        with graphs_split(self.config, world_size=self.world_size):
            output = super().training_step(*args, **kwargs)
        # One process alone leaves such a step to Lightning.
        if output is None and self._module.automatic_optimization and self.world_size > 1:
            assert self._weighting is not None
            return self._weighting.skip()
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # As the base class does it, but for weight and scope: gradients must be final before `precision.post_backward`,
        # which calls `on_after_backward`, also on a rank where no parameter took part.
        self._progress.enter("backward")
        self.pre_backward(closure_loss)
        if self.reducer is not None:
            self.reducer.finiteness.see_loss(closure_loss)
        if self._weighting is not None:
            closure_loss = self._weighting.weigh(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self._module)
        with self.reducer.backward() if self.reducer is not None else nullcontext():
            self.precision_plugin.backward(closure_loss, self._module, optimizer, *args, **kwargs)
        if self._signals is not None:
            self._signals.after_backward()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self._module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backwards inside accumulate gradients on this rank only."""
        with self.reducer.no_sync() if self.reducer is not None else nullcontext():
            yield

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self._weighting is not None and self._module.automatic_optimization:
            closure = self._weighting.agreed(closure)

        def step(closure: Callable[[], Any]) -> Any:
            return super(TrainingHooks, self).optimizer_step(optimizer, self._before_step(closure), model, **kwargs)

        checks = [] if self.reducer is None else [self.reducer.finiteness]
        output = step_unless_withheld(step, optimizer, checks, closure=closure, precision=self.precision_plugin)
        self._progress.complete_step()
        if self.reducer is not None and self.reducer.stats.num_skipped:
            self._module.log("bucketddp/skipped_steps", float(self.reducer.stats.num_skipped), on_step=True)
        if self.reducer is not None and self.reducer.stats.num_nonfinite:
            self._module.log("bucketddp/nonfinite_steps", float(self.reducer.stats.num_nonfinite), on_step=True)
        if self._model_averager is not None:
            params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
            self._model_averager.average_parameters(iter(params))
        return output

    def _before_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """`closure`, after which the optimizer changes the weights."""

        def run() -> Any:
            output = closure()
            self._progress.enter(OPTIMIZER)
            return output

        return run

    def on_validation_start(self) -> None:
        if self._buffers is not None:
            self._buffers.begin_validation()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._progress.enter("validation")
        if self._buffers is not None:
            self._buffers.before_validation_step()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._progress.enter("test")
        return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._progress.enter("prediction")
        return super().predict_step(*args, **kwargs)

    def on_test_start(self) -> None:
        self._share_statistics()

    def on_predict_start(self) -> None:
        self._share_statistics()

    def on_train_start(self) -> None:
        if self._checks is not None and self._checks.are_periodic:
            self._checks.compare(self._trained_state(), when="before the first step")

    def on_train_end(self) -> None:
        self._share_statistics()
        if self.reducer is not None:
            self.reducer.finiteness.catch_up(self.reducer.stats)
        if self._checks is not None and self._checks.are_periodic:
            self._checks.compare(self._trained_state(), when="at the end of training")

    def _end_run(self) -> None:
        has_raised = self._fault_handler is not None and self._fault_handler.has_raised
        self._end_watching()
        # A program may fit thousands of times. After an error some rank may still wait for this one.
        if self._weighting is not None and self._weighting.exchange.close() and not has_raised:
            assert self._collectives is not None
            self._collectives.close_host_groups()
        self._weighting = None

    def _trained_state(self) -> TrainingState:
        """What training changes in the same way on every rank."""
        assert self._replicas is not None
        return training_state(self._replicas.parameters, self.optimizers)

    def _shared_state(self) -> TrainingState:
        """That, and the buffers. Forwards change those on each rank in its own way, so they are shared first."""
        assert self._replicas is not None
        state = self._trained_state()
        if self._buffers is not None:
            self._buffers.before_training_step()
            state.tensors.update(self._replicas.shared_buffers())
        return state

    def _share_statistics(self) -> None:
        if self._buffers is not None:
            self._buffers.before_evaluation()
