"""`BucketDDPStrategy` for the Trainer, less its Lightning base class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.constants import default_pg_timeout

from lightning_bucketddp.checkpoint.async_writer import CheckpointWriter
from lightning_bucketddp.checkpoint.finite_weights import FiniteCheckpoints
from lightning_bucketddp.comm.collectives import Collectives, all_gather, files_of_collectives
from lightning_bucketddp.config import AUTO, ReducerConfig
from lightning_bucketddp.faults.progress import Progress
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.consistency import OnDivergence, ReplicaCheckConfig, ReplicaChecks
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.strategies.batch_weighting import BatchWeighting, GradientWeightOption, check_gradient_weight
from lightning_bucketddp.strategies.fault_handling import FaultHandler
from lightning_bucketddp.strategies.options import (
    RejectsUnknownOptions,
    StartMethod,
    check_backend,
    check_devices,
    check_flags,
    check_functions,
    check_period,
    check_seconds,
    check_timeout,
    choose_bucket_sizes,
    resolve_start_method,
    settle_torch_options,
)
from lightning_bucketddp.strategies.rank_seeds import RankSeeds
from lightning_bucketddp.strategies.recording import RecordsSteps
from lightning_bucketddp.strategies.roots import accept_in_every_root, follow_root
from lightning_bucketddp.strategies.shared_buffers import SharedBuffers
from lightning_bucketddp.strategies.start import StartsTogether
from lightning_bucketddp.strategies.synced_layers import SyncedLayers
from lightning_bucketddp.strategies.trainer_checkpoints import CheckpointHooks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy as _ParallelStrategy
else:
    _ParallelStrategy = object


class TrainerStrategy(RejectsUnknownOptions, CheckpointHooks, RecordsSteps, StartsTogether, _ParallelStrategy):
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
            `auto`: sizes computed from what the first backwards have shown (docs/tuning.md).
        bucket_cap_mb_list: The list under torch DDP's name for it.
        overlap: Reduce gradients while backward still runs.
        reduce_dtype: What gradients travel as; by default their own dtype. They arrive in their own in any case.
        broadcast_buffers: Keep all ranks on rank 0's buffers.
        forward_sync_buffers: torch DDP's new name for `broadcast_buffers`.
        init_sync: At the start give every rank rank 0's weights. The ranks' modules are compared in any case.
        check_replicas_every_n_steps: How often the ranks compare their weights and optimizer state, beside the
            comparison before each checkpoint; None or 0: only then.
        on_divergence: What to do if they differ: `raise` on every rank, `heal` by what most ranks hold, or `log` it.
        rank_seeds: Give each rank random numbers of its own, for dropout and augmentation, and save them.
        gradient_weight: How much each batch counts in the average: `batch_size`, or a function that takes a batch and
            gives its weight, for example its number of tokens. By default every rank counts the same.
        uneven_data: Train until every rank has run out of data; one that has takes part with weight zero.
        start_timeout_s: How many seconds the ranks wait for each other at the start.
        stall_warning_s: After how many seconds of waiting the log says which rank is behind, and what it does.
        async_checkpoints: Write checkpoints while training goes on.
        on_nonfinite: What to do in a step in which a loss or a gradient is infinite or nan on some rank: `warn` and go
            on, `raise` on every rank, or `skip` the optimizer's step on every rank.
        check_gradients: Look at the gradients, too, and not at the losses only.
        monitor: Add a `BucketDDPMonitor`, which logs and records what steps spend their time on.
        find_unused_parameters: No effect; unused parameters are always handled.
        static_graph: No effect; how often each parameter is used is learned.
        gradient_as_bucket_view: No effect; gradients always live in their buckets.
        batched_grad_copy: No effect; gradients are always copied by one call per bucket.
        skip_all_reduce_unused_params: No effect; unused parameters need no mode of their own.
        device_ids: No effect; Lightning gives each process its device. Another one is refused.
        output_device: No effect; outputs stay on the device of the process. Another one is refused.
        dim: No effect; batches are not scattered to devices.
        check_reduction: No effect; torch ignores it, too.
        delay_all_reduce_named_params: No effect; each bucket leaves as soon as it is complete.
        param_to_hook_all_reduce: No effect; each bucket leaves as soon as it is complete.
        process_group: No effect; gradients are averaged over all ranks. A group of some of them is refused.
        device_mesh: No effect; gradients are averaged over all ranks. Another mesh is refused.
        mixed_precision: Refused; Lightning does it (`precision` of the Trainer or of Fabric).
    """

    # Fabric looks for one before it says that it is Fabric (see `follow_root`).
    _precision: ClassVar[Any] = None

    # The strategy class that a root of Lightning accepts.
    _class_for_root: ClassVar[Any]
    _torch_sync_batchnorm: ClassVar[type]
    _batch_size_of: ClassVar[Any]

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
        bucket_cap_mb_list: list[float] | None = None,
        overlap: bool = True,
        reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None,
        broadcast_buffers: bool = True,
        forward_sync_buffers: bool | None = None,
        init_sync: bool = True,
        check_replicas_every_n_steps: int | None = 100,
        on_divergence: OnDivergence = "raise",
        rank_seeds: bool = False,
        gradient_weight: GradientWeightOption = None,
        uneven_data: bool = False,
        start_timeout_s: float = 300.0,
        stall_warning_s: float = 30.0,
        async_checkpoints: bool = False,
        on_nonfinite: Literal["warn", "raise", "skip"] = "warn",
        check_gradients: bool = True,
        monitor: bool = False,
        find_unused_parameters: bool | None = None,
        static_graph: bool | None = None,
        gradient_as_bucket_view: bool | None = None,
        batched_grad_copy: bool | None = None,
        skip_all_reduce_unused_params: bool | None = None,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        dim: int | None = None,
        check_reduction: bool | None = None,
        delay_all_reduce_named_params: list[Any] | None = None,
        param_to_hook_all_reduce: Any = None,
        process_group: Any = None,
        device_mesh: Any = None,
        mixed_precision: Any = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        settle_torch_options(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            batched_grad_copy=batched_grad_copy,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            device_ids=device_ids,
            output_device=output_device,
            dim=dim,
            check_reduction=check_reduction,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            process_group=process_group,
            device_mesh=device_mesh,
            mixed_precision=mixed_precision,
        )
        if forward_sync_buffers is not None:
            broadcast_buffers = forward_sync_buffers
        check_flags(
            overlap=overlap,
            broadcast_buffers=broadcast_buffers,
            init_sync=init_sync,
            rank_seeds=rank_seeds,
            uneven_data=uneven_data,
            async_checkpoints=async_checkpoints,
            check_gradients=check_gradients,
            monitor=monitor,
        )
        check_functions(ddp_comm_hook=ddp_comm_hook, ddp_comm_wrapper=ddp_comm_wrapper)
        self.config = ReducerConfig(
            bucket_cap_mb=choose_bucket_sizes(bucket_cap_mb, bucket_cap_mb_list),
            overlap=overlap,
            reduce_dtype=reduce_dtype,
            broadcast_buffers=broadcast_buffers,
            comm_hook=ddp_comm_wrapper(ddp_comm_hook) if ddp_comm_wrapper and ddp_comm_hook else ddp_comm_hook,
            comm_state=ddp_comm_state,
            on_nonfinite=on_nonfinite,
            check_gradients=check_gradients,
        )
        self.reducer: Reducer | None = None
        self._replicas: Replicas | None = None
        self._collectives: Collectives | None = None
        self._init_sync = init_sync
        self._check_config = ReplicaCheckConfig(every_n_steps=check_replicas_every_n_steps, on_divergence=on_divergence)
        self._checks: ReplicaChecks | None = None
        self._rank_seeds = RankSeeds() if rank_seeds else None
        self._is_fitting = False
        self._is_restoring = False
        self._synced_layers: SyncedLayers | None = None
        self._buffers: SharedBuffers | None = None
        self._gradient_weight = check_gradient_weight(gradient_weight)
        self._extends_uneven_data = uneven_data
        self._weighting: BatchWeighting | None = None
        self._start_timeout_s = check_seconds("start_timeout_s", start_timeout_s)
        self._stall_warning_s = check_seconds("stall_warning_s", stall_warning_s, may_be_endless=True)
        self._progress = Progress(waiting_in=files_of_collectives())
        self._fault_handler: FaultHandler | None = None
        self._async_checkpoints = async_checkpoints
        self._writer = CheckpointWriter()
        self._finite_checkpoints = FiniteCheckpoints()
        self._has_monitor = monitor
        self._torch_devices = (device_ids, output_device)
        # Read by what `adopt_process_setup` takes over.
        self._num_nodes = 1
        self._process_group_backend = check_backend(process_group_backend)
        self._timeout = check_timeout(timeout)
        self._start_method = resolve_start_method(start_method)
        self._ddp_comm_state = ddp_comm_state
        self._model_averaging_period = check_period(model_averaging_period)
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
        check_devices(self.root_device, *self._torch_devices)
        self._start_together()
        self.setup_distributed()
        # Without a Trainer nobody would say when the run is over.
        if self.world_size > 1 and self.lightning_module is not None:
            self._begin_watching().handle_signals(self._module.trainer, callback=self._callback)
        if self._collectives is None or not self._collectives.is_open:
            self._collectives = Collectives(self.root_device, timeout=self._timeout)
        self._is_restoring = True

    def setup(self, trainer: Trainer) -> None:
        assert self._collectives is not None
        self._restored()
        self._is_fitting = trainer.state.fn == "fit"
        if self._is_fitting:
            self._weights_at_start = None  # known when all is restored
        if self._rank_seeds is not None and not self._is_fitting:
            self._rank_seeds.forget_checkpoint()
        # One process alone has nobody to wait for, but may weigh its micro-batches.
        if self._is_fitting and (self._collectives.world_size > 1 or self._gradient_weight is not None):
            self._weighting = BatchWeighting(
                trainer,
                self._collectives,
                weight_of=self._batch_size_of if self._gradient_weight == "batch_size" else self._gradient_weight,
                extends_uneven_data=self._extends_uneven_data,
                has_alert=lambda: self._writer.has_failed,
            )
            if self._signals is not None:
                self._signals.travel_with(self._weighting.exchange)
        if self._is_fitting and self._layer_sync is not None:
            assert self.model is not None
            self._synced_layers = SyncedLayers(
                self._layer_sync, ours=self._torch_sync_batchnorm, collectives=self._collectives
            )
            self.model = self._synced_layers.apply(self.model)
        super().setup(trainer)
        if self._is_fitting and isinstance(self._ddp_comm_state, PostLocalSGDState):
            self._enable_model_averaging()

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        assert self._collectives is not None
        self._replicas = Replicas(model, self._collectives)
        self._replicas.agree()
        if self._init_sync:
            self._replicas.broadcast()
        if self._is_fitting:
            if self.reducer is not None:
                self.reducer.close()
            # Buffers are shared before a forward, not by the reducer after a backward: callbacks may change them.
            self.reducer = Reducer(
                self._replicas,
                replace(self.config, broadcast_buffers=False),
                weighting=None if self._weighting is None else self._weighting.weighting,
                finiteness=self._make_finiteness(self._replicas),
                say=rank_zero_info,
            )
            self._progress.describe_backward = self.reducer.describe_backward
        if self.config.broadcast_buffers:
            self._buffers = SharedBuffers(self._replicas, None if self.reducer is None else self.reducer.stats)
        self._checks = self._make_checks()
        return model

    def setup_optimizers(self, trainer: Trainer) -> None:
        if self._rank_seeds is not None:
            # Now that the weights are shared, and before anything asks for the training data: workers' seeds are drawn.
            assert self._collectives is not None
            self._rank_seeds.begin(step=trainer.global_step, collectives=self._collectives, device=self.root_device)
        super().setup_optimizers(trainer)

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._rank_seeds is not None:
            self._rank_seeds.continue_after_start(self._module.trainer, self.root_device)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return all_gather(tensor, group=group, sync_grads=sync_grads)

    def teardown(self) -> None:
        if self.reducer is not None:
            self.reducer.close()
        if self._synced_layers is not None:
            assert self.model is not None
            self.model = self._synced_layers.revert(self.model)
            self._synced_layers = None
        self._end_run()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        # What belongs to this process's group means nothing in the processes that a spawn pickles us for.
        of_group = ("_collectives", "_fault_handler", "_weighting", "_checks")
        of_module = ("reducer", "_replicas", "_synced_layers", "_buffers")
        return {**super().__getstate__(), **dict.fromkeys([*of_group, *of_module])}


accept_in_every_root(TrainerStrategy)
