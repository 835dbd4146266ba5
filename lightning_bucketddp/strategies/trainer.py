"""`BucketDDPStrategy` for the Trainer, less its Lightning base class: hooks in the order in which they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import Unpack

from lightning_bucketddp.checkpoint.rank_state import RankSeeds
from lightning_bucketddp.config import AUTO, LocalSteps, MaxRestarts, ReplicaChecks, Timeouts
from lightning_bucketddp.data.epoch_position import EpochPosition
from lightning_bucketddp.data.global_batch_size import GlobalBatchSize
from lightning_bucketddp.faults.progress import FORWARD
from lightning_bucketddp.faults.signals import StopSignals
from lightning_bucketddp.local_steps.islands import Islands
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.sharding.shards import ShardOption, Shards
from lightning_bucketddp.strategies import fit_state, trainer_step
from lightning_bucketddp.strategies.base import StrategyBase
from lightning_bucketddp.strategies.fit_state import FitState, LoaderPreparation
from lightning_bucketddp.strategies.options import DDPOptions, GradientWeightOption, StartMethod
from lightning_bucketddp.strategies.restarts import Restarts
from lightning_bucketddp.strategies.trainer_checkpoints import TrainerCheckpoints

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy as _ParallelStrategy
else:
    _ParallelStrategy = object


class TrainerStrategy(StrategyBase, _ParallelStrategy):
    """Data-parallel training with its own gradient bucketing.

    Takes the keywords of Lightning's `DDPStrategy` and of torch's `DistributedDataParallel`.

    Args:
        ddp_comm_state: State for `ddp_comm_hook`.
        ddp_comm_hook: A communication hook as torch DDP takes it. Runs on every backend.
        ddp_comm_wrapper: Wraps `ddp_comm_hook`, for example `fp16_compress_wrapper`.
        model_averaging_period: Steps between averages of the model, for post-localSGD.
        process_group_backend: For example `nccl` or `gloo`. By default the one that fits the device.
        timeout: How long a collective may take: a `timedelta`, or a number of seconds.
        start_method: How the processes are started.
        bucket_cap_mb: Largest size of a gradient bucket in MiB, or a list of sizes for the buckets one by one.
            `auto`: sizes computed from what the first backwards have shown (docs/faster.md).
        overlap: Reduce gradients while backward still runs.
        reduce_dtype: What gradients travel as; by default their own dtype. They arrive in their own in any case.
            `int8`: a quarter of the bytes of fp32, for slow networks (docs/slow-networks.md).
        shard_optimizer: Divide the optimizers' state among the ranks: the same numbers, and a fraction of its memory on
            each. `parameters`: by whole parameters, also where an optimizer would allow smaller parts.
        replica_checks: After how many steps the ranks compare their weights and optimizer state, beside the comparison
            before each checkpoint; None: only then. `ReplicaChecks` also says what to do if they differ.
        rank_seeds: Give each rank random numbers of its own, for dropout and augmentation, and save them.
        gradient_weight: How much each batch counts in the average: `batch_size`, or a function that takes a batch and
            gives its weight, for example its number of tokens. By default every rank counts the same.
        uneven_data: Train until every rank has run out of data; one that has takes part with weight zero.
        shard_iterable: Deal out each `IterableDataset` of a `DataLoader`, which every rank and worker would read in
            full: sample by sample to the ranks, batch by batch to the workers of a rank.
        exact_evaluation: Evaluate every sample once, instead of repeating some until all ranks have as many.
        gather_predictions: Return the predictions of all ranks from `trainer.predict` on rank zero.
        global_batch_size: How many samples of all ranks make an optimizer's step. Sets each rank's batch size, up to
            that of the `DataLoader`, and the accumulation. By default both are yours.
        timeouts: How many seconds ranks wait for each other at the start, and for one that is stuck.
        async_checkpoints: Write checkpoints while training goes on.
        auto_resume: Have `trainer.fit` without `ckpt_path` continue from the newest intact checkpoint of this run,
            within an epoch with the samples that it has not trained on.
        max_restarts: How often a fit goes on after a failure, from the newest checkpoint: in the processes that are
            well, and in a new one for a rank that died (docs/restart.md). Needs `auto_resume`. `MaxRestarts` says more.
        on_nonfinite: What to do in a step in which a loss or a gradient is infinite or nan on some rank: `warn` and go
            on, `raise` on every rank, or `skip` the optimizer's step on every rank; None: look for neither.
        local_steps: How many steps each host takes without the others, before all ranks average what these have changed
            in the weights (DiLoCo), for slow networks; or `LocalSteps`, which says more. By default all ranks average
            their gradients in each step.
        cuda_graphs: Capture `training_step` and backward as CUDA graphs, and replay them: without time of the host.
            What cannot be captured runs as usual, and the log says why (docs/faster.md).
        **ddp_options: Other keywords of torch's `DistributedDataParallel` (`DDPOptions`).
    """

    # Fabric looks for one before it says that it is Fabric (see `follow_root`).
    _precision: ClassVar[Any] = None
    # Set while somebody searches for a batch size, by steps that do not count.
    is_searching: bool = False

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        ddp_comm_state: object = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: float | timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        *,
        bucket_cap_mb: float | list[float] | Literal["auto"] | None = AUTO,
        overlap: bool = True,
        reduce_dtype: Literal["fp32", "bf16", "fp16", "int8"] | torch.dtype | None = None,
        shard_optimizer: ShardOption = False,
        replica_checks: ReplicaChecks | int | None = 100,
        rank_seeds: bool = False,
        gradient_weight: GradientWeightOption = None,
        uneven_data: bool = False,
        shard_iterable: bool = False,
        exact_evaluation: bool = True,
        gather_predictions: bool = False,
        global_batch_size: int | None = None,
        timeouts: Timeouts = Timeouts(),
        async_checkpoints: bool = False,
        auto_resume: bool = False,
        max_restarts: MaxRestarts | int = 0,
        on_nonfinite: Literal["warn", "raise", "skip"] | None = "warn",
        local_steps: LocalSteps | int | None = None,
        cuda_graphs: bool = False,
        **ddp_options: Unpack[DDPOptions],
    ) -> None:
        arguments = dict(locals())
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self._take_options(arguments)
        self._io = checkpoint_io
        self._state = FitState()
        self._loaders = LoaderPreparation()
        self._checkpoints = TrainerCheckpoints(self)
        self.recording = trainer_step.StepRecording()
        self.restarts = Restarts(self) if self.options.max_restarts.number > 0 else None
        self._rank_seeds = RankSeeds() if self.options.rank_seeds else None
        size, weight = self.options.global_batch_size, self.options.gradient_weight
        # What makes a step stays what it is on another number of ranks, also where only the user resumes.
        self._position = EpochPosition(is_on=self.options.auto_resume or size is not None)
        self._batch_size = GlobalBatchSize(size, weighs=weight is None, begun=self._position.begun)
        self._islands: Islands | None = None
        # Read by what `adopt_process_setup` takes over.
        self._ddp_comm_state = ddp_comm_state
        self._model_averaging_period = self.options.model_averaging_period
        self._model_averager: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # What belongs to this process's group means nothing in the processes that a spawn pickles us for.
        absent = dict.fromkeys(("_collectives", "_fault_handler", "_islands"))
        return {**super().__getstate__(), **absent, "_state": FitState()}

    @property
    def _parts(self) -> list[RunPart]:
        return fit_state.run_parts(self)

    @property
    def reducer(self) -> Reducer | None:
        """What averages the gradients of the last fit; None: there was none."""
        return self._state.reducer

    @property
    def shards(self) -> Shards | None:
        return self._state.shards

    @property
    def has_partial_weights(self) -> bool:
        local_steps = self._state.local_steps
        return super().has_partial_weights or (local_steps is not None and local_steps.is_partial)

    @property
    def signals(self) -> StopSignals | None:
        return None if self._fault_handler is None else self._fault_handler.signals

    @property
    def is_distributed(self) -> bool:
        """For code that asks the strategy; Lightning itself sees a `DDPStrategy` (see `adopt_process_setup`)."""
        return True

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank does what one does for all: rank zero, or the one that saves when it has died."""
        is_saver = None if self._fault_handler is None else self._fault_handler.is_saver
        return self.global_rank == 0 if is_saver is None else is_saver

    @property
    def trainer(self) -> Trainer:
        assert self.lightning_module is not None  # there is one as long as there is a run
        return self.lightning_module.trainer

    def _active_reducers(self) -> list[Reducer]:
        return [] if self.reducer is None else [self.reducer]

    def gather_json(self, value: Any) -> list[Any]:
        """Return this JSON value of every rank, by rank."""
        assert self._collectives is not None  # there is a run
        return self._collectives.gather_json(value)

    # The start of a run.

    @property
    def accelerator(self) -> Any:
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        # The first thing that a Trainer or Fabric gives us, and it tells which root of Lightning that is from.
        self.root.follow_root(self, accelerator)
        self._accelerator = accelerator

    def launched(self, trainer: Any, function: Callable[..., Any], args: Any) -> AbstractContextManager[None]:
        return self._checkpoints.auto_resume.launched(trainer, function, args)

    def setup_environment(self) -> None:
        self._checkpoints.refuse_plugin(self.root.async_checkpoint_io)
        super().setup_environment()
        self.set_world_ranks()
        self._start_together()
        self.setup_distributed()
        if self.restarts is not None and self.lightning_module is not None:
            self.restarts.begin_attempt(self.trainer)
        # Without a Trainer nobody would say when the run is over.
        if self.world_size > 1 and self.lightning_module is not None:
            self._begin_watching().handle_signals(self.trainer, callback=self.root.callback)
        if self._collectives is None or not self._collectives.is_open:
            self._collectives = self._new_collectives()
            self._checkpoints.join_process_group()
        self._position.forget_checkpoint()
        if self.lightning_module is not None:
            self._loaders.watch(self.trainer)
        self._checkpoints.begin_restoring()

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        load = super().load_checkpoint
        return self._checkpoints.load(checkpoint_path, lambda path: load(path, *args, **kwargs))

    def setup(self, trainer: Trainer) -> None:
        is_fit = trainer.state.fn == "fit"
        self._checkpoints.end_restoring(is_fit=is_fit)
        # What is left of an earlier fit is told by `reducer`, also after an evaluation, and can be saved.
        self._state = FitState(is_fit=is_fit, reducer=self.reducer, shards=self.shards)
        fit_state.prepare_run(self, trainer)
        super().setup(trainer)
        if is_fit:
            if self.differs_by_design:
                self._enable_model_averaging()
            self._log_start(self.reducer)

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        fit_state.set_up_model(self, model)
        return model

    def setup_optimizers(self, trainer: Trainer) -> None:
        if self._rank_seeds is not None:
            # Now that the weights are shared, and before anything asks for the training data: workers' seeds are drawn.
            assert self._collectives is not None
            self._rank_seeds.begin(step=trainer.global_step, collectives=self._collectives, device=self.root_device)
        super().setup_optimizers(trainer)
        fit_state.divide_optimizers(self, trainer.lightning_module)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # Called in each fit that resumes, after `setup`, and by nothing else that reads a checkpoint.
        if self._state.local_steps is not None:
            checkpoint = self._state.local_steps.take_state(checkpoint, self.precision_plugin)
        super().load_optimizer_state_dict(checkpoint)
        self._checkpoints.restore(checkpoint)

    # Data.

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """What Lightning makes the sampler of a dataloader with (Note: all samples first)."""
        ranks = {"num_replicas": self.world_size, "rank": self.global_rank}
        return ranks if self._state.evaluation is None else self._state.evaluation.sampler_kwargs() or ranks

    def process_dataloader(self, dataloader: object) -> object:
        return self._loaders.prepare(dataloader, self._parts)

    # Training.

    def on_train_start(self) -> None:
        trainer_step.begin_training(self)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        # Validation has batches of its own.
        is_training = self.lightning_module is not None and self.trainer.training
        if is_training:
            for part in self._parts:
                part.inspect_batch(batch)
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if is_training:
            self.recording.batch_arrived()
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        trainer_step.begin_batch(self, batch_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step = super().training_step
        return trainer_step.run_forward(self, lambda: step(*args, **kwargs))

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        return trainer_step.run_backward(self, closure_loss, optimizer, *args, **kwargs)

    def before_forward(self) -> None:
        """Do what comes before each `training_step`, also before a replay of one."""
        self._progress.enter(FORWARD)
        for part in self._parts:
            part.before_forward()

    def weigh(self, loss: Tensor) -> Tensor:
        """Return `loss` as backward shall see it, and count its weight."""
        for part in self._parts:
            loss = part.weigh(loss)
        return loss

    def loss_factor(self) -> float:
        """Return what `weigh` multiplies the loss of this batch by."""
        assert self._state.weighting is not None  # there is one as long as there is a fit
        return self._state.weighting.loss_factor

    def release_graphs(self) -> None:
        if self._state.graphs is not None:
            self._state.graphs.release()

    def replayed_backward(self) -> AbstractContextManager[None]:
        return trainer_step.replayed_backward(self)

    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Accumulate gradients on this rank only, in backwards that run inside."""
        return nullcontext() if self.reducer is None else self.reducer.no_sync()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        take = super().optimizer_step
        return trainer_step.take_step(self, optimizer, closure, lambda before: take(optimizer, before, model, **kwargs))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return `tensor` reduced over the ranks: in place, but for a mean of integers, which is a fraction."""
        is_mean = reduce_op in ("mean", "avg", torch.distributed.ReduceOp.AVG)
        if is_mean and isinstance(tensor, Tensor) and not (tensor.is_floating_point() or tensor.is_complex()):
            # Lightning divides logged means by a mean number of samples. One that is cut off would be wrong. This
            # rank's own number goes on counting, and must not become that of all ranks.
            total = self.root.reduce(self, tensor.clone(), group, "sum")
            # A run that was aborted has no process group, and nothing was added up.
            return total / (torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1)
        return self.root.reduce(self, tensor, group, reduce_op)

    # Evaluation.

    def on_validation_start(self) -> None:
        for part in self._parts:
            part.begin_validation()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._progress.enter("validation")
        for part in self._parts:
            part.before_validation_step()
        return super().validation_step(*args, **kwargs)

    def on_test_start(self) -> None:
        for part in self._parts:
            part.before_evaluation()

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._progress.enter("test")
        return super().test_step(*args, **kwargs)

    def on_predict_start(self) -> None:
        for part in self._parts:
            part.before_evaluation()
        for part in self._parts:
            part.begin_prediction()

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._progress.enter("prediction")
        return super().predict_step(*args, **kwargs)

    def on_predict_end(self) -> None:
        for part in self._parts:
            part.end_prediction()

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights, which are those of all ranks: the first thing that goes into a checkpoint."""
        if self._state.islands is not None:
            self._checkpoints.await_all("the weights of all islands")
        for part in self._parts:
            part.before_save()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of `optimizer` for a checkpoint: with `shard_optimizer` all of it, on rank zero."""
        if self._state.shards is not None:
            self._checkpoints.await_all("the state of an optimizer")
        state = self._sharded_state(optimizer)
        return super().optimizer_state(optimizer) if state is None else state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Compare the replicas, then write on rank zero; a failure is raised on every rank."""
        write = super().save_checkpoint
        self._checkpoints.save(checkpoint, filepath, lambda content, path: write(content, path, storage_options))

    def remove_checkpoint(self, filepath: Any) -> None:
        self._checkpoints.remove(filepath, super().remove_checkpoint)

    def wait_for_checkpoints(self) -> None:
        """Wait until all checkpoints are written; a failure is raised on every rank. All ranks must call this."""
        self._checkpoints.wait()

    def directory_to_save_in(self) -> str | None:
        return self._checkpoints.directory() if self._state.is_fit else None

    # The end of a run.

    def on_train_end(self) -> None:
        trainer_step.end_training(self)

    def end_run_by(self, error: BaseException) -> None:
        try:
            super().end_run_by(error)
        finally:
            trainer_step.undo_unfinished(self, error)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._checkpoints.close()

    def teardown(self) -> None:
        self._batch_size.end()
        self._loaders.close()
        self.model = self._state.close(self.model)
        has_raised = self._fault_handler is not None and self._fault_handler.watchdog.is_ending
        # Otherwise `on_fit_end` and `teardown` of the user's are still to come.
        if has_raised:
            self._end_watching()
        self._state.end_exchange(self._collectives, has_raised=has_raised)
        self._checkpoints.close()
        super().teardown()
        if self._state.shards is not None:
            # The model was moved to the CPU, so that its memory on the device is free.
            self._state.shards.follow_params()

    def end_run(self) -> None:
        stop_signal = 0 if self.signals is None else self.signals.stop_signal
        self._end_watching()
        trainer_step.end_run(self, stop_signal)
