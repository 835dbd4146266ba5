"""What happens in the steps of a fit, of a `BucketDDPStrategy` for the Trainer."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_bucketddp.comm.trial import Trials
from lightning_bucketddp.data.epoch_position import EpochPosition
from lightning_bucketddp.data.global_batch_size import GlobalBatchSize
from lightning_bucketddp.faults.progress import BACKWARD, FORWARD, OPTIMIZER
from lightning_bucketddp.faults.signals import StopSignals
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.reducer.graphs import graphs_split, outside_of_graphs
from lightning_bucketddp.reducer.nonfinite import StepWithheld, drop_gradients, withhold_nonfinite
from lightning_bucketddp.reducer.observer import NO_OBSERVER, BackwardObserver
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.consistency import TrainingState, training_state
from lightning_bucketddp.sharding.shards import Shards
from lightning_bucketddp.strategies.base import StrategyBase
from lightning_bucketddp.strategies.exact_evaluation import divided_loaders, gather_predictions
from lightning_bucketddp.strategies.fit_state import FitState
from lightning_bucketddp.strategies.recording import StepRecording
from lightning_bucketddp.trainer_internals import (
    Undo,
    batch_progress,
    return_predictions,
    set_up_training_data_within,
)

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy as _ParallelStrategy

    from lightning_bucketddp.recording.schema import Run
    from lightning_bucketddp.recording.step_recorder import MarkedStep, StepRecorder
else:
    _ParallelStrategy = object


class TrainerStepHooks(StrategyBase, _ParallelStrategy):
    """The part of a strategy that Lightning calls for each batch, from fetching it to the optimizer's step."""

    _state: FitState
    _recording: StepRecording
    _model_averager: Any
    _batch_size: GlobalBatchSize
    _position: EpochPosition
    # How many training dataloaders have come since Lightning began to set them up; None: others come, or none.
    _num_training_loaders: int | None = None
    _end_watching_training_data: Undo | None = None
    # By dataloader of the prediction that runs.
    _are_divided: list[bool]
    # None: nobody searches for a batch size.
    _trials: Trials | None = None

    @property
    def reducer(self) -> Reducer | None:
        """What averages the gradients of the last fit; None: there was none."""
        return self._state.reducer

    @property
    def shards(self) -> Shards | None:
        return self._state.shards

    @property
    def _parts(self) -> list[RunPart]:
        """What takes part in this run: all ranks call their hooks in this order."""
        state = self._state
        parts = [
            self._batch_size,
            state.sharding,
            self._position if self._trials is None else None,
            state.first_batches,
            state.buffers,
            state.unfinished,  # after the buffers: copies those that are shared
            state.local_steps,
            state.weighting,
            state.layers,  # after the weighting: asks whether this rank is idle
            state.comparison,
            state.graphs if self._trials is None else None,
        ]
        return [part for part in parts if part is not None]

    @property
    def has_partial_weights(self) -> bool:
        local_steps = self._state.local_steps
        return super().has_partial_weights or (local_steps is not None and local_steps.is_partial)

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None  # there is one as long as there is a run
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    def _active_reducers(self) -> list[Reducer]:
        return [] if self.reducer is None else [self.reducer]

    @property
    def _signals(self) -> StopSignals | None:
        return None if self._fault_handler is None else self._fault_handler.signals

    def process_dataloader(self, dataloader: object) -> object:
        is_training = self._num_training_loaders is not None
        if self._num_training_loaders == 0:
            for part in self._parts:
                part.begin_loaders()
        if self._num_training_loaders is not None:
            self._num_training_loaders += 1
        for part in self._parts:
            dataloader = part.prepare_loader(dataloader, is_training=is_training)
        return dataloader

    def _watch_training_data(self) -> None:
        """Know from now on which dataloaders are for training."""
        self._stop_watching_training_data()
        self._end_watching_training_data = set_up_training_data_within(self._trainer, self._setting_up_training_data)

    def _stop_watching_training_data(self) -> None:
        if self._end_watching_training_data is not None:
            self._end_watching_training_data()
        self._end_watching_training_data = None

    @contextmanager
    def _setting_up_training_data(self) -> Iterator[None]:
        self._num_training_loaders = 0
        try:
            yield
        finally:
            self._num_training_loaders = None

    def _num_batches_trained(self) -> int | None:
        """Return how many batches of an epoch a run that resumes from here must not see again; None: it is over."""
        progress = batch_progress(self._trainer)
        num_batches = self._position.num_batches_trained()
        num_batches = int(progress.current.processed) if num_batches is None else num_batches
        is_over = progress.is_last_batch and num_batches == progress.current.ready
        return None if is_over else num_batches

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._is_training():
            for part in self._parts:
                part.see_batch(batch)
        batch = super().batch_to_device(batch, device, dataloader_idx)
        # Validation has batches of its own.
        if self._is_training():
            self._recording.batch_arrived()
        return batch

    def _is_training(self) -> bool:
        return self.lightning_module is not None and self._trainer.training

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._progress.epoch, self._progress.batch = self._module.current_epoch, batch_idx
        self._progress.enter("start")
        state = self._state
        # Layers may have been added or replaced between epochs. Looking costs more than a step of a small model.
        if batch_idx == 0 and state.replicas is not None and state.replicas.are_outdated(self._module):
            self._setup_model(self._module)
        for part in self._parts:
            part.begin_batch(batch_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._recording.forward(self.reducer):
            self.before_forward()
            if self.reducer is not None:
                self.reducer.give_back_memory()
            with graphs_split(self.config, world_size=self.world_size):
                output = super().training_step(*args, **kwargs)
        if output is None and self._module.automatic_optimization and self._state.weighting is not None:
            return self._state.weighting.skip()
        return output

    def before_forward(self) -> None:
        """Do what comes before each `training_step`."""
        self._progress.enter(FORWARD)
        for part in self._parts:
            part.before_forward()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # As the base class does it, but for weight and scope: gradients must be final before `precision.post_backward`,
        # which calls `on_after_backward`, also on a rank where no parameter took part.
        with self._recording.during(BACKWARD):
            self._progress.enter(BACKWARD)
            self.pre_backward(closure_loss)
            reducer = self.reducer
            if reducer is not None:
                reducer.finiteness.see_loss(closure_loss)
            closure_loss = self.precision_plugin.pre_backward(self.weigh(closure_loss), self._module)
            with self._synchronised_backward():
                self.precision_plugin.backward(closure_loss, self._module, optimizer, *args, **kwargs)
            if self._signals is not None:
                self._signals.stop_if_agreed()
            closure_loss = self.precision_plugin.post_backward(closure_loss, self._module)
            self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def _synchronised_backward(self) -> Iterator[None]:
        if self.reducer is None:
            yield
            return
        # In a trial the ranks fail together and go on.
        ending = nullcontext() if self._trials is not None else self._ending_all_ranks(self.reducer)
        with ending, self.reducer.backward():
            yield

    def weigh(self, loss: Tensor) -> Tensor:
        """Return `loss` as backward shall see it, and count its weight."""
        for part in self._parts:
            loss = part.weigh(loss)
        return loss

    def loss_factor(self) -> float:
        """Return what `weigh` multiplies the loss of this batch by."""
        assert self._state.weighting is not None  # there is one as long as there is a fit
        return self._state.weighting.loss_factor

    @contextmanager
    def replayed_backward(self) -> Iterator[None]:
        """Run a replay of forward and backward inside; afterwards gradients are final."""
        with self._recording.during(BACKWARD), self._ending_all_ranks(*self._active_reducers()):
            self._progress.enter(BACKWARD)
            yield
        if self._signals is not None:
            self._signals.stop_if_agreed()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only, in backwards that run inside."""
        with nullcontext() if self.reducer is None else self.reducer.no_sync():
            yield

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        phase = self._recording.phase
        try:
            output = super().optimizer_step(optimizer, self._before_step(optimizer, closure), model, **kwargs)
        except StepWithheld:
            drop_gradients(optimizer, self.precision_plugin)
            output = None
        for part in self._parts:
            part.complete_step()
        self._progress.complete_step()
        self._log_counts()
        if self._model_averager is not None:
            params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
            self._model_averager.average_parameters(iter(params))
        # The trainer counts this step later.
        self._recording.complete_step(self.reducer, step=self._trainer.global_step, phase=phase)
        return output

    def _before_step(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return what the optimizer calls before it changes weights: Lightning's `closure`, and all that we add."""

        def run() -> Any:
            loss = closure()  # forward and backward, where Lightning optimizes
            self._recording.optimizer_begins()
            weighting = self._state.weighting
            assert weighting is not None  # there is one as long as there is a fit
            if self._module.automatic_optimization:
                loss = weighting.agree(loss)
            else:
                self._tell_own_gradients(optimizer)
            if weighting.nobody_trained:
                raise StepWithheld
            if self.reducer is not None:
                withhold_nonfinite(optimizer, [self.reducer.finiteness])
            self._progress.enter(OPTIMIZER)
            return loss

        # The user may have compiled the optimizer's step, and has not meant all of this.
        return outside_of_graphs(run)

    def _tell_own_gradients(self, optimizer: Optimizer) -> None:
        reason = self._explain_own_gradients(optimizer, remedy="self.manual_backward(loss)")
        if reason is None or self._state.has_told_own_gradients:
            return
        if self.shards is not None:
            raise RuntimeError(f"{reason} `shard_optimizer` needs the averages.")
        self._state.has_told_own_gradients = True
        rank_zero_warn(f"bucketddp: {reason} Weights differ between the ranks from now on.")

    def _log_counts(self) -> None:
        if self.reducer is None:
            return
        stats = self.reducer.stats
        for name, count in (("skipped_steps", stats.num_skipped), ("nonfinite_steps", stats.num_nonfinite)):
            if count:
                self._module.log(f"bucketddp/{name}", float(count), on_step=True)

    def on_validation_start(self) -> None:
        for part in self._parts:
            part.begin_validation()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._progress.enter("validation")
        for part in self._parts:
            part.before_validation_step()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._progress.enter("test")
        return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._progress.enter("prediction")
        return super().predict_step(*args, **kwargs)

    def on_test_start(self) -> None:
        for part in self._parts:
            part.before_evaluation()

    def on_predict_start(self) -> None:
        for part in self._parts:
            part.before_evaluation()
        if self._gathers_predictions:
            self._are_divided = divided_loaders(self._trainer.predict_loop)
            # Lightning returns none where it has launched processes by itself.
            if self._start_method != "popen":
                return_predictions(self._trainer)

    def on_predict_end(self) -> None:
        loop = self._trainer.predict_loop
        if self._gathers_predictions and loop.return_predictions:
            assert self._collectives is not None
            by_loader = [loop.predictions] if loop.num_dataloaders == 1 else loop.predictions
            divided = [batches for batches, is_divided in zip(by_loader, self._are_divided, strict=True) if is_divided]
            gather_predictions(divided, self._collectives)

    @property
    def _gathers_predictions(self) -> bool:
        return self.options.gather_predictions and self.world_size > 1

    def on_train_start(self) -> None:
        for part in self._parts:
            part.begin_training()

    def on_train_end(self) -> None:
        if self.reducer is not None:
            self.reducer.finiteness.catch_up(self.reducer.stats)
        for part in self._parts:
            part.end_training()

    def _trained_state(self) -> TrainingState:
        """Return what training changes in the same way on every rank."""
        assert self._state.replicas is not None
        return training_state(self._state.replicas.parameters, self.optimizers, is_divided=self._is_divided)

    def _shared_state(self) -> TrainingState:
        """Return that and the buffers. Forwards change those on each rank in its own way, so they are shared first."""
        state = self._trained_state()
        if self._state.buffers is not None:
            state.tensors.update(self._state.buffers.shared_buffers())
        return state

    def end_run_by(self, error: BaseException) -> None:
        try:
            super().end_run_by(error)
        finally:
            # Where the device has failed, nothing can be saved.
            with suppress(RuntimeError):
                if not isinstance(error, self._normal_ends):
                    self._undo_unfinished_batch()

    def _undo_unfinished_batch(self) -> None:
        """Undo what a batch has changed that a resumed run will see again (Note: unfinished batch)."""
        unfinished = self._state.unfinished
        if unfinished is None or not unfinished.has_copies:
            return
        if not (unfinished.has_seen_step or self._module.automatic_optimization):
            return
        if self._repeats_micro_batches or self._counts.completed < unfinished.num_batches:
            unfinished.undo()

    @property
    def _counts(self) -> Any:
        """Lightning's counts of the batches of this epoch."""
        return batch_progress(self._trainer).current

    @property
    def _repeats_micro_batches(self) -> bool:
        """Whether a resumed run begins after the last step, and not where Lightning counts the last batch."""
        return self._position.num_batches_trained() is not None

    # What `BucketDDPMonitor` calls.

    @property
    def recorder(self) -> StepRecorder | None:
        """Who records steps now, if anybody does."""
        return self._recording.recorder

    def begin_recording(self, recorder: StepRecorder, on_recorded: Callable[[MarkedStep], None]) -> None:
        """Record steps from now on; `on_recorded` gets each when the optimizer has stepped."""
        assert self.reducer is not None  # there is one as long as there is a fit
        recorder.begin(self.reducer.stats)
        self._recording.begin(recorder, on_recorded)
        self._observe_gathers(recorder)

    def end_recording(self) -> None:
        """Record nothing any more."""
        self._recording.end(self.reducer)
        self._observe_gathers(NO_OBSERVER)

    def _observe_gathers(self, observer: BackwardObserver) -> None:
        if self.shards is not None:
            self.shards.observe(observer)

    def gather_json(self, value: Any) -> list[Any]:
        """Return this JSON value of every rank, by rank."""
        assert self._collectives is not None  # there is a run
        return self._collectives.gather_json(value)

    def describe_run(self) -> Run:
        """Return what stays the same in a fit."""
        from lightning_bucketddp.recording.schema import Run
        from lightning_bucketddp.reducer.quantization import measure_codecs

        assert self.reducer is not None
        trainer, specs = self._trainer, self.reducer.specs
        params = [param for param in self.reducer.replicas.parameters.values() if param.requires_grad]
        bytes_by_kind = Counter[str]()
        for spec in specs:
            bytes_by_kind[spec.kind.partition(" ")[0]] += spec.num_bytes
        is_gpu = self.root_device.type == "cuda"
        return Run(
            rank=self.global_rank,
            world_size=self.world_size,
            host=socket.gethostname(),
            device=torch.cuda.get_device_name(self.root_device) if is_gpu else self.root_device.type,
            backend=self._get_process_group_backend(),
            num_parameters=sum(param.numel() for param in params),
            gradient_bytes=sum(param.nbytes for param in params),
            options={
                "bucket_cap_mb": self.config.bucket_cap_mb,
                "overlap": self.config.overlap,
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "reduce_dtype": self.config.reduce_dtype,
                "ddp_comm_hook": getattr(self.config.comm_hook, "__qualname__", None),
                "gradient_dtype": max(bytes_by_kind, key=lambda kind: bytes_by_kind[kind]),
                "accumulate_grad_batches": trainer.accumulate_grad_batches,
                "shard_optimizer": self.options.shard_optimizer or None,
                "local_steps": None if self.options.local_steps is None else self.options.local_steps.steps,
                "num_islands": None if self._state.islands is None else self._state.islands.number,
                "num_workers": getattr(trainer.train_dataloader, "num_workers", None),
            },
            codecs=measure_codecs(self.root_device) if self.world_size > 1 else {},
        )
