"""`BucketDDPStrategy` for the Trainer, less its Lightning base class: hooks in the order in which they are called."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from lightning_bucketddp.faults.progress import BACKWARD, FORWARD
from lightning_bucketddp.local_steps.islands import Islands
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.processes import rank_zero_info
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.sharding.shards import ShardOption, Shards
from lightning_bucketddp.strategies import fit_state, trainer_step
from lightning_bucketddp.strategies.base import StrategyBase
from lightning_bucketddp.strategies.fit_state import FitState, FitTally, LoaderPreparation
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
            `auto`: sizes computed from measurements in the first backwards (docs/faster.md).
        overlap: Reduce gradients while backward still runs.
        reduce_dtype: What gradients travel as; by default their own dtype. They arrive in their own in any case.
            `int8`: a quarter of the bytes of fp32, for slow networks (docs/slow-networks.md).
        shard_optimizer: Divide the optimizers' state among the ranks: the same numbers, and a fraction of its memory on
            each. `parameters`: by whole parameters, also where an optimizer would allow smaller parts.
        replica_checks: After how many steps the ranks compare their weights and optimizer state, beside the comparison
            before each checkpoint; None: only then. A `ReplicaChecks` also sets what to do if they differ.
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
        max_restarts: How often a fit goes on after a failure, from the newest checkpoint, with a new process for a rank
            that died (docs/restart.md). Needs `auto_resume`. A `MaxRestarts` sets more.
        on_nonfinite: What to do in a step in which a loss or a gradient is infinite or nan on some rank: `warn` and go
            on, `raise` on every rank, or `skip` the optimizer's step on every rank; None: look for neither.
        local_steps: How many steps each host takes without the others, before all ranks average the changes of the
            weights (DiLoCo), for slow networks; a `LocalSteps` sets more. By default ranks average gradients instead.
        cuda_graphs: Capture `training_step` and backward as CUDA graphs, and replay them: without time of the host.
            What cannot be captured runs as usual, and the reason is logged (docs/faster.md).
        **ddp_options: Other keywords of torch's `DistributedDataParallel` (`DDPOptions`).
    """

    _precision: ClassVar[Any] = None  # Fabric reads it before it sets the accelerator (see `follow_root`)
    is_searching: bool = False  # for a batch size, by steps that do not count

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
        self._state = FitState()
        self._loaders = LoaderPreparation()
        self._checkpoints = TrainerCheckpoints(self)
        self.recording = trainer_step.StepRecording()
        self.restarts = Restarts(self) if self.options.max_restarts.number > 0 else None
        self._rank_seeds = RankSeeds() if self.options.rank_seeds else None
        size, weight = self.options.global_batch_size, self.options.gradient_weight
        # With `global_batch_size` a step stays the same on another number of ranks, also where only the user resumes.
        is_exact = self.options.auto_resume or self.options.shard_iterable or size is not None
        self._position = EpochPosition(is_on=is_exact)
        self._batch_size = GlobalBatchSize(size, weighs=weight is None, begun=self._position.begun)
        self._islands: Islands | None = None
        self._ddp_comm_state = ddp_comm_state  # the methods of `adopt_process_setup` read these three
        self._model_averaging_period = self.options.model_averaging_period
        self._model_averager: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # A spawned process cannot use what belongs to the process group of this one.
        absent = dict.fromkeys(("_collectives", "_fault_handler", "_islands"))
        return {**super().__getstate__(), **absent, "_state": FitState(), "_loaders": LoaderPreparation()}

    @property
    def _parts(self) -> list[RunPart]:
        return fit_state.run_parts(self)

    @property
    def reducer(self) -> Reducer | None:
        """What averages the gradients of the last fit; None: there was no fit."""
        return self._state.reducer

    @property
    def shards(self) -> Shards | None:
        return self._state.shards

    @property
    def has_partial_weights(self) -> bool:
        local_steps = self._state.local_steps
        return super().has_partial_weights or (local_steps is not None and local_steps.is_partial)

    @property
    def is_distributed(self) -> bool:  # for users; Lightning asks for a `DDPStrategy` (see `adopt_process_setup`)
        return True

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank acts for all: it is rank zero, or saves in its place because that rank has died."""
        is_saver = None if self._fault_handler is None else self._fault_handler.is_saver
        return self.global_rank == 0 if is_saver is None else is_saver

    @property
    def trainer(self) -> Trainer:
        assert self.lightning_module is not None  # a run has begun
        return self.lightning_module.trainer

    def _active_reducers(self) -> list[Reducer]:
        return [] if self.reducer is None else [self.reducer]

    # The start of a run.

    def launched(self, *args: Any) -> AbstractContextManager[None]:
        return self._checkpoints.auto_resume.launched(*args)

    def setup_environment(self) -> None:
        self._checkpoints.refuse_plugin()
        super().setup_environment()
        self.set_world_ranks()
        self._start_together()
        self.setup_distributed()
        # Without a Trainer nothing would end the watchdog.
        if self.world_size > 1 and self.lightning_module is not None:
            self._begin_watching().handle_signals(self.trainer, callback=self.root.callback)
        if self._collectives is None or not self._collectives.is_open:
            self._collectives = self._new_collectives()
            self._checkpoints.join_process_group()
        self._position.forget_checkpoint()
        if self._rank_seeds is not None:
            self._rank_seeds.forget_checkpoint()
        if self.lightning_module is not None:
            self._loaders.watch(self.trainer)
        self._checkpoints.begin_restoring()

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        load = super().load_checkpoint
        return self._checkpoints.load(checkpoint_path, lambda path: load(path, *args, **kwargs))

    def setup(self, trainer: Trainer) -> None:
        is_fit = trainer.state.fn == "fit"
        self._checkpoints.end_restoring(is_fit=is_fit)
        # After an evaluation, the state of an earlier fit can still be read and saved.
        self._state = FitState(is_fit=is_fit, reducer=self.reducer, shards=self.shards)
        fit_state.prepare_run(self, trainer)
        super().setup(trainer)
        if is_fit and self.differs_by_design:
            self._enable_model_averaging()
        if is_fit:
            self._log_start(self.reducer)
        if self.restarts is not None:  # Lightning registers its handlers next
            self.restarts.note_requeue(is_pause=False)

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        fit_state.set_up_model(self, model)
        return model

    def setup_optimizers(self, trainer: Trainer) -> None:
        if self._rank_seeds is not None and self._collectives is not None:
            # After the weights are shared, and before the training data is made, which draws the seeds of workers.
            self._rank_seeds.begin(step=trainer.global_step, collectives=self._collectives, device=self.root_device)
        super().setup_optimizers(trainer)
        fit_state.divide_optimizers(self, trainer.lightning_module)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # Lightning calls this in each fit that resumes, after `setup`, and not where else a checkpoint is read.
        if self._state.local_steps is not None:
            checkpoint = self._state.local_steps.take_state(checkpoint, self.precision_plugin)
        super().load_optimizer_state_dict(checkpoint)
        self._checkpoints.restore(checkpoint)

    # Data.

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of the sampler that Lightning gives a dataloader (Note: all samples first)."""
        ranks = {"num_replicas": self.world_size, "rank": self.global_rank}
        return ranks if self._state.evaluation is None else self._state.evaluation.sampler_kwargs() or ranks

    def process_dataloader(self, dataloader: object) -> object:
        return self._loaders.prepare(dataloader, self._parts)

    # Training.

    def on_train_start(self) -> None:
        for part in self._parts:
            part.begin_training()
        self._checkpoints.begin_training()
        self._state.tally = FitTally(self)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        is_training = self.lightning_module is not None and self.trainer.training
        if is_training:
            for part in self._parts:
                part.inspect_batch(batch)
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if is_training:
            self.recording.batch_arrived()
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._refuse_after_failure()
        trainer_step.begin_batch(self, batch_idx)

    def _refuse_after_failure(self) -> None:
        """Raise if a backward has failed, even if a `training_step` has caught its error."""
        if self.reducer is not None and not self.is_searching:
            self.reducer.refuse_after_failure()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step = trainer_step.with_hooks(self, super().training_step)
        return trainer_step.run_forward(self, lambda: step(*args, **kwargs))

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        return trainer_step.run_backward(self, closure_loss, optimizer, *args, **kwargs)

    def before_forward(self) -> None:
        """Prepare for a `training_step`, or for a replay of one."""
        self._progress.enter(FORWARD)
        for part in self._parts:
            part.before_forward()

    def weigh(self, loss: Tensor) -> Tensor:
        """Return the weighted `loss` for backward, and count its weight."""
        for part in self._parts:
            loss = part.weigh(loss)
        return loss

    def loss_factor(self) -> float:
        """Return what `weigh` multiplies the loss of this batch by."""
        return math.prod(part.loss_factor for part in self._parts)

    def release_graphs(self) -> None:
        if self._state.graphs is not None:
            self._state.graphs.release()

    @contextmanager
    def replayed_backward(self) -> Iterator[None]:
        """Run a replay of `training_step` and backward inside; afterwards gradients are final."""
        with self.recording.during(BACKWARD), self.ending_all_ranks(*self._active_reducers()):
            self._progress.enter(BACKWARD)
            yield
        if self.signals is not None:
            self.signals.stop_if_agreed()

    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Accumulate gradients on this rank only, in backwards that run inside."""
        return nullcontext() if self.reducer is None else self.reducer.no_sync()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        take = super().optimizer_step
        return trainer_step.take_step(self, optimizer, closure, lambda before: take(optimizer, before, model, **kwargs))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce `tensor` over the ranks, in place except for a mean of integers, and return it."""
        is_mean = reduce_op in ("mean", "avg", torch.distributed.ReduceOp.AVG)
        if is_mean and isinstance(tensor, Tensor) and not (tensor.is_floating_point() or tensor.is_complex()):
            # Lightning divides logged means by the mean number of samples, which must not be truncated, and goes on
            # counting in `tensor`, which must stay this rank's own.
            total = self.root.reduce(self, tensor.clone(), group, "sum")
            # An aborted run has no process group, and nothing was summed.
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
        return trainer_step.with_hooks(self, super().validation_step)(*args, **kwargs)

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
        """Return the weights, the same on all ranks. Lightning puts them into a checkpoint first."""
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
        self._refuse_after_failure()
        if self.reducer is not None:
            self.reducer.finiteness.catch_up(self.reducer.stats)
        for part in self._parts:
            part.end_training()
        self._checkpoints.end_training()
        assert self._state.tally is not None  # training has begun
        self._state.done = self._state.tally.describe()

    def end_run_by(self, error: BaseException) -> None:
        if self._state.unfinished is not None and not isinstance(error, self.root.normal_ends):
            self._state.unfinished.is_interrupted = True
        super().end_run_by(error)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._checkpoints.close()

    def teardown(self) -> None:
        self._batch_size.end()
        self._loaders.close()
        self.model = self._state.close(self.model)
        has_raised = self._fault_handler is not None and self._fault_handler.watchdog.is_ending
        if has_raised:  # otherwise `on_fit_end` and `teardown` of the user are still to come
            self._end_watching()
        self._state.end_exchange(self._collectives, has_raised=has_raised)
        self._checkpoints.close()
        super().teardown()
        if self._state.shards is not None:
            # Lightning has moved the model to the CPU to free its memory on the device.
            self._state.shards.follow_params()

    def end_run(self) -> None:
        stop_signal = 0 if self._fault_handler is None else self._fault_handler.await_others()
        self._end_watching()
        done, self._state.done = self._state.done, []
        if done:
            rank_zero_info(f"bucketddp: {'; '.join(done)}.")
        if stop_signal == signal.SIGINT:  # too late for this run, but the program may begin another one
            signal.raise_signal(signal.SIGINT)
