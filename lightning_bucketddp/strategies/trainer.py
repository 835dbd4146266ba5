"""`BucketDDPStrategy` for the Trainer, less its Lightning base class."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.constants import default_pg_timeout
from typing_extensions import Unpack

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.roll_call import RollCall
from lightning_bucketddp.comm.step_exchange import StepExchange
from lightning_bucketddp.comm.trial import Trials
from lightning_bucketddp.config import AUTO, LocalSteps, ReplicaChecks, Timeouts
from lightning_bucketddp.data.epoch_position import EpochPosition
from lightning_bucketddp.data.first_batches import FirstBatches
from lightning_bucketddp.data.global_batch_size import GlobalBatchSize
from lightning_bucketddp.data.sharded_iterable import IterableSharding
from lightning_bucketddp.graphs.captured_steps import CapturedSteps, new_graph
from lightning_bucketddp.local_steps.islands import Islands, find_islands, refuse_layers_between_islands
from lightning_bucketddp.processes import rank_zero_info
from lightning_bucketddp.reducer.nonfinite import Finiteness, scaler_of
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.consistency import ReplicaComparison
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.sharding.shards import ShardOption
from lightning_bucketddp.strategies.auto_resume import AutoResume
from lightning_bucketddp.strategies.batch_weighting import BatchWeighting
from lightning_bucketddp.strategies.exact_evaluation import ExactEvaluation
from lightning_bucketddp.strategies.fit_state import (
    BufferSync,
    ConvertedLayers,
    FitState,
    LayersOfPlugin,
    ScheduledComparison,
    begin_local_steps,
)
from lightning_bucketddp.strategies.options import (
    DDPOptions,
    GradientWeightOption,
    StartMethod,
    StrategyOptions,
    accept_in_every_root,
    check_devices,
    follow_root,
)
from lightning_bucketddp.strategies.rank_seeds import RankSeeds
from lightning_bucketddp.strategies.recording import FitTally, StepRecording
from lightning_bucketddp.strategies.trainer_checkpoints import TrainerCheckpointHooks
from lightning_bucketddp.strategies.unfinished_batch import UnfinishedBatch
from lightning_bucketddp.trainer_internals import layer_sync_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


# `ModelCheckpoint` removes older ones; of so many one should be left.
_NUM_SAVED_KNOWN = 20


class TrainerStrategy(TrainerCheckpointHooks):
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
        exact_evaluation: Evaluate every sample once in validation, test and prediction, instead of repeating some until
            all ranks have as many.
        gather_predictions: Return the predictions of all ranks from `trainer.predict` on rank zero.
        global_batch_size: How many samples of all ranks make an optimizer's step. Sets each rank's batch size, up to
            that of the `DataLoader`, and the accumulation. By default both are yours.
        timeouts: How many seconds ranks wait for each other at the start, and for one that is stuck.
        async_checkpoints: Write checkpoints while training goes on.
        auto_resume: Have `trainer.fit` without `ckpt_path` continue from the newest intact checkpoint of this run,
            within an epoch with the samples that it has not trained on.
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

    # The strategy class that a root of Lightning accepts.
    _class_for_root: ClassVar[Any]
    # Lightning's base class of callbacks.
    _callback: ClassVar[type]
    _torch_sync_batchnorm: ClassVar[type]
    _lightning_reduce: ClassVar[Any]
    _batch_size_of: ClassVar[Any]
    _is_oom_error: ClassVar[Any]

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
        reduce_dtype: Literal["fp32", "bf16", "fp16", "int8"] | None = None,
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
        on_nonfinite: Literal["warn", "raise", "skip"] | None = "warn",
        local_steps: LocalSteps | int | None = None,
        cuda_graphs: bool = False,
        **ddp_options: Unpack[DDPOptions],
    ) -> None:
        arguments = dict(locals())
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._take_options(StrategyOptions.of(arguments))
        self._io = checkpoint_io
        self._state = FitState()
        self._recording = StepRecording()
        self._rank_seeds = RankSeeds() if self.options.rank_seeds else None
        size = self.options.global_batch_size
        # What makes a step stays what it is on another number of ranks, also where only the user resumes.
        self._position = EpochPosition(is_on=self.options.auto_resume or size is not None)
        weighs = self.options.gradient_weight is None
        self._batch_size = GlobalBatchSize(size, weighs=weighs, begun=self._position.begun)
        self._auto_resume = AutoResume(is_on=self.options.auto_resume)
        self._islands: Islands | None = None
        self._is_restoring = False
        self._saves: RollCall | None = None
        self._saved = deque(maxlen=_NUM_SAVED_KNOWN)
        # Read by what `adopt_process_setup` takes over.
        self._ddp_comm_state = ddp_comm_state
        self._model_averaging_period = self.options.model_averaging_period
        self._model_averager: Any = None

    @property
    def is_distributed(self) -> bool:
        """For code that asks the strategy; Lightning itself sees a `DDPStrategy` (see `adopt_process_setup`)."""
        return True

    @property
    def accelerator(self) -> Any:
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        # The first thing that a Trainer or Fabric gives us, and it tells which root of Lightning that is from.
        follow_root(self, accelerator, self._class_for_root)
        self._accelerator = accelerator

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        check_devices(self.root_device, *self.options.torch_devices)
        self._start_together()
        self.setup_distributed()
        # Without a Trainer nobody would say when the run is over.
        if self.world_size > 1 and self.lightning_module is not None:
            self._begin_watching().handle_signals(self._trainer, callback=self._callback)
        if self._collectives is None or not self._collectives.is_open:
            self._collectives = self._new_collectives()
            if self.world_size > 1:
                timeout_s = (self._timeout or default_pg_timeout).total_seconds()
                self._saves = RollCall(rank=self.global_rank, world_size=self.world_size, timeout_s=timeout_s)
        self._position.forget_checkpoint()
        if self.lightning_module is not None:
            self._watch_training_data()
            self._auto_resume.begin(self._trainer, self._collectives, is_first_of_host=self.local_rank == 0)
        self._is_restoring = True

    def setup(self, trainer: Trainer) -> None:
        self._restored()
        # What is left of an earlier fit is told by `reducer`, also after an evaluation, and can be saved.
        self._state = FitState(is_fit=trainer.state.fn == "fit", reducer=self.reducer, shards=self.shards)
        self._prepare_evaluation(trainer)
        if self.options.shard_iterable:
            self._state.sharding = IterableSharding(
                rank=self.global_rank,
                world_size=self.world_size,
                warn=rank_zero_warn,
                num_batches_trained=self._num_batches_trained,
            )
        if self._state.is_fit:
            self._weights_at_start = None  # known when all is restored
            self._prepare_fit(trainer)
        elif self._rank_seeds is not None:
            self._rank_seeds.forget_checkpoint()
        super().setup(trainer)
        if self._state.is_fit and self._differs_by_design:
            self._enable_model_averaging()
        if self._state.is_fit:
            self._log_start(self.reducer)

    def _prepare_evaluation(self, trainer: Trainer) -> None:
        assert self._collectives is not None
        if self._collectives.world_size > 1:
            self._state.evaluation = ExactEvaluation(
                trainer,
                self._collectives,
                pads=not self.options.exact_evaluation,
                keeps_batches=self.options.gather_predictions,
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """What Lightning makes the sampler of a dataloader with (Note: all samples first)."""
        ranks = {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}
        return ranks if self._state.evaluation is None else self._state.evaluation.sampler_kwargs() or ranks

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return `tensor` reduced over the ranks: in place, but for a mean of integers, which is a fraction."""
        is_mean = reduce_op in ("mean", "avg", torch.distributed.ReduceOp.AVG)
        if is_mean and isinstance(tensor, torch.Tensor) and not (tensor.is_floating_point() or tensor.is_complex()):
            # Lightning divides logged means by a mean number of samples. One that is cut off would be wrong. This
            # rank's own number goes on counting, and must not become that of all ranks.
            total = self._lightning_reduce(tensor.clone(), group, "sum")
            # A run that was aborted has no process group, and nothing was added up.
            return total / (torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1)
        return self._lightning_reduce(tensor, group, reduce_op)

    def _prepare_fit(self, trainer: Trainer) -> None:
        """Make what belongs to a fit and does not need the parameters."""
        assert self._collectives is not None
        assert self.model is not None
        self._batch_size.begin(trainer)
        self._position.begin(trainer)
        if self._state.shards is not None:
            self._state.shards.close()
        self._state.shards = self._new_shards()
        state, weight = self._state, self.options.gradient_weight
        if self.options.local_steps is not None:
            self._islands = find_islands(
                self._collectives,
                self.options.local_steps,
                known=self._islands,
                host=f"{socket.gethostname()} {self.cluster_environment.node_rank()}",
                syncs_layers=layer_sync_of(self) is not None,
            )
        if self._islands is not None:
            begin_local_steps(
                state,
                trainer,
                self._islands,
                self.options,
                progress=self._progress,
                signals=self._signals,
                has_alert=lambda: self._writer.has_failed,
                callback=self._callback,
            )
        else:
            # One process alone has nobody to wait for, but may weigh its micro-batches.
            if self._collectives.world_size > 1 or weight is not None:
                state.exchange = StepExchange(self._collectives, has_alert=lambda: self._writer.has_failed)
            state.weighting = BatchWeighting(
                trainer,
                state.exchange,
                self._collectives,
                weight_of=self._batch_size_of if weight == "batch_size" else weight,
                extends_uneven_data=self.options.uneven_data,
                has_alert=lambda: self._writer.has_failed,
            )
            if self._signals is not None and state.exchange is not None:
                self._signals.travel_with(state.exchange)
        if self.options.cuda_graphs:
            make_graph = new_graph(self.root_device)
            state.graphs = CapturedSteps(trainer, self, self._steps_with, tell=rank_zero_info, make_graph=make_graph)
        # To overfit on the same batches everywhere is a way to test a model.
        if self._steps_with.world_size > 1 and state.exchange is not None and not trainer.overfit_batches:  # type: ignore[attr-defined]
            state.first_batches = FirstBatches(state.exchange, warn=rank_zero_warn)
        if (layer_sync := layer_sync_of(self)) is not None:
            weighting = state.weighting
            assert weighting is not None
            state.layers = LayersOfPlugin(layer_sync)
            if type(layer_sync) is self._torch_sync_batchnorm:
                state.layers = ConvertedLayers(self._steps_with, is_idle=lambda: weighting.is_idle)
            self.model = state.layers.apply(self.model)
        if state.islands is not None:
            refuse_layers_between_islands(self.model, state.islands)

    @property
    def _steps_with(self) -> Collectives:
        """The ranks that average gradients with this one in each step."""
        assert self._collectives is not None
        return self._collectives if self._state.islands is None else self._state.islands.own

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        assert self._collectives is not None
        state = self._state
        state.replicas = Replicas(model, self._collectives)
        state.replicas.agree()
        if self.options.init_sync:
            state.replicas.broadcast()
        if state.islands is not None:
            state.replicas = Replicas(model, state.islands.own)
        if state.is_fit:
            if state.reducer is not None:
                state.reducer.close()
            state.reducer = Reducer(
                state.replicas,
                self.config,
                weighting=None if state.weighting is None else state.weighting.weighting,
                maker=state.shards,
                finiteness=self._make_finiteness(state.replicas),
            )
            if state.local_steps is not None:
                state.local_steps.set_replicas(state.replicas, state.reducer.stats)
            state.unfinished = UnfinishedBatch(
                model,
                device=None if self._rank_seeds is None else self.root_device,
                num_batches=lambda: self._counts.ready,
                repeats_micro_batches=lambda: self._repeats_micro_batches,
            )
            self._progress.describe_backward = state.reducer.describe_backward
            state.comparison = None
            # In a search some ranks may make a step that others do not. It ends with what it began with.
            may_differ = self._differs_by_design or self._trials is not None
            if state.exchange is not None and self._steps_with.world_size > 1 and not may_differ:
                stats = state.reducer.stats
                state.comparison = ScheduledComparison(
                    ReplicaComparison(
                        self._steps_with, self.options.replica_checks, exchange=state.exchange, has_messages=True
                    ),
                    trained_state=self._trained_state,
                    shared_state=self._shared_state,
                    num_backwards=lambda: stats.num_backwards,
                )
        if self.options.broadcast_buffers:
            state.buffers = BufferSync(
                state.replicas,
                None if state.reducer is None else state.reducer.stats,
                once=state.is_fit and not self._module.automatic_optimization,
            )
        return model

    def _make_finiteness(self, replicas: Replicas) -> Finiteness:
        def where() -> str:
            trainer = self._trainer
            return f"step {trainer.global_step} (epoch {trainer.current_epoch}, batch {trainer.fit_loop.batch_idx})"

        return Finiteness(replicas, self.config, where=where, has_scaler=scaler_of(self.precision_plugin) is not None)

    def setup_optimizers(self, trainer: Trainer) -> None:
        if self._rank_seeds is not None:
            # Now that the weights are shared, and before anything asks for the training data: workers' seeds are drawn.
            assert self._collectives is not None
            self._rank_seeds.begin(step=trainer.global_step, collectives=self._collectives, device=self.root_device)
        super().setup_optimizers(trainer)
        state = self._state
        if state.shards is not None:
            if state.shards.optimizers:
                # Others in their place: what was divided belongs to the old ones.
                state.shards.close()
                state.shards = self._new_shards()
                self._setup_model(self._module)
            assert state.shards is not None
            for optimizer in self.optimizers:
                state.shards.add(optimizer)

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Search inside for a setting by trials; afterwards training begins as if there had been none."""
        assert self._collectives is not None
        if self._state.islands is not None:
            raise ValueError(
                "`BatchSizeFinder` needs all ranks in each step, and `local_steps` keeps them apart. Search"
                " without `local_steps`, and pass the batch size that was found."
            )
        self._trials = Trials(self._collectives, is_out_of_memory=self._is_oom_error)
        try:
            yield
        finally:
            self._trials = None
        self.forget_step()

    def trial(self) -> AbstractContextManager[None]:
        """Try what is inside on all ranks; if it raises on one, it does so on all (Note: failing together)."""
        assert self._trials is not None
        return self._trials.attempt()

    def forget_step(self) -> None:
        """Drop what steps have left that do not count, or that were interrupted. All ranks must call this."""
        if self._state.weighting is not None:
            self._state.weighting.forget_step()
        if self._state.is_fit:
            self._setup_model(self._module)

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._rank_seeds is not None:
            self._rank_seeds.continue_after_start(self._trainer, self.root_device)
        assert self.reducer is not None  # there is one as long as there is a fit
        self._state.tally = FitTally(self._trainer.global_step, self.reducer)

    def on_train_end(self) -> None:
        super().on_train_end()
        state = self._state
        assert state.tally is not None
        done = [
            state.tally.describe(self._trainer.global_step),
            *(part.describe() for part in self._parts),
            "" if state.shards is None else state.shards.describe(),
            self.checkpoint_stats.describe() if self.checkpoint_stats.num_saves else "",
        ]
        state.done = [line for line in done if line]

    def end_run(self) -> None:
        self._end_watching()
        done, self._state.done = self._state.done, []
        if done:
            rank_zero_info(f"bucketddp: {'; '.join(done)}.")

    def teardown(self) -> None:
        self._batch_size.end()
        self._stop_watching_training_data()
        self.model = self._state.close(self.model)
        has_raised = self._fault_handler is not None and self._fault_handler.has_raised
        # Otherwise `on_fit_end` and `teardown` of the user's are still to come.
        if has_raised:
            self._end_watching()
        # A program may fit thousands of times. After an error some rank may still wait for this one.
        if self._state.end_exchange() and not has_raised:
            assert self._collectives is not None
            self._collectives.close_host_groups()
            if self._islands is not None:
                self._islands.own.close_host_groups()
                self._islands.peers.close_host_groups()
        super().teardown()
        if self._state.shards is not None:
            # The model was moved to the CPU, so that its memory on the device is free.
            self._state.shards.follow_params()

    def __getstate__(self) -> dict[str, Any]:
        # What belongs to this process's group means nothing in the processes that a spawn pickles us for.
        return {
            **super().__getstate__(),
            "_collectives": None,
            "_saves": None,
            "_fault_handler": None,
            "_islands": None,
            "_state": FitState(),
            "_trials": None,
        }


accept_in_every_root(TrainerStrategy)
