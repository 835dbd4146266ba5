"""`BucketDDPStrategy` for Fabric, less its Lightning base class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout

from lightning_bucketddp.checkpoint.rank_zero import write_on_rank_zero
from lightning_bucketddp.core.collectives import Collectives, all_gather
from lightning_bucketddp.core.compiled import graphs_split
from lightning_bucketddp.core.config import ReducerConfig
from lightning_bucketddp.core.reducer import Reducer
from lightning_bucketddp.core.replicas import Replicas
from lightning_bucketddp.strategies.options import (
    RejectsUnknownOptions,
    StartMethod,
    explain_without_effect,
    resolve_start_method,
)
from lightning_bucketddp.strategies.start import StartsTogether, check_start_timeout

if TYPE_CHECKING:
    from lightning.fabric.strategies.ddp import DDPStrategy as _ParallelStrategy
else:
    _ParallelStrategy = object


class FabricStrategy(RejectsUnknownOptions, StartsTogether, _ParallelStrategy):
    """Data-parallel training with its own gradient bucketing, for Fabric.

    Takes the keywords of Fabric's `DDPStrategy` and of torch's `DistributedDataParallel`.

    Args:
        ddp_comm_state: State for `ddp_comm_hook`.
        ddp_comm_hook: A communication hook as torch DDP takes it. Runs on every backend.
        process_group_backend: For example `nccl` or `gloo`. By default the one that fits the device.
        timeout: How long a collective may take.
        start_method: How the processes are started.
        bucket_cap_mb: Largest size of a gradient bucket in MiB, or a list of sizes for the buckets one by one.
        bucket_cap_mb_list: The list under torch DDP's name for it.
        overlap: Reduce gradients while backward still runs.
        reduce_dtype: What gradients travel as; by default their own dtype. They arrive in their own in any case.
        broadcast_buffers: Keep all ranks on rank 0's buffers.
        forward_sync_buffers: torch DDP's new name for `broadcast_buffers`.
        init_sync: At set-up compare the ranks' modules and give every rank rank 0's weights.
        start_timeout_s: How many seconds the ranks wait for each other at the start.
        find_unused_parameters: No effect; unused parameters are always handled.
        static_graph: No effect; how often each parameter is used is learned.
        gradient_as_bucket_view: No effect; gradients always live in their buckets.
        batched_grad_copy: No effect; gradients are always copied by one call per bucket.
        skip_all_reduce_unused_params: No effect; unused parameters need no mode of their own.
    """

    _default_checkpoint_io: ClassVar[type[Any]]

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        *,
        ddp_comm_state: object = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        bucket_cap_mb: float | list[float] | None = 25.0,
        bucket_cap_mb_list: list[float] | None = None,
        overlap: bool = True,
        reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None,
        broadcast_buffers: bool = True,
        forward_sync_buffers: bool | None = None,
        init_sync: bool = True,
        start_timeout_s: float = 300.0,
        find_unused_parameters: bool | None = None,
        static_graph: bool | None = None,
        gradient_as_bucket_view: bool | None = None,
        batched_grad_copy: bool | None = None,
        skip_all_reduce_unused_params: bool | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        explain_without_effect(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            batched_grad_copy=batched_grad_copy,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
        )
        self.config = ReducerConfig(
            bucket_cap_mb=bucket_cap_mb_list if bucket_cap_mb_list is not None else bucket_cap_mb,
            overlap=overlap,
            reduce_dtype=reduce_dtype,
            broadcast_buffers=broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers,
            comm_hook=ddp_comm_hook,
            comm_state=ddp_comm_state,
        )
        self.reducers: dict[nn.Module, Reducer] = {}
        self._init_sync = init_sync
        self._collectives: Collectives | None = None
        self._backward_sync_control: Any = _BackwardSyncControl(self)
        self._start_timeout_s = check_start_timeout(start_timeout_s)
        # Read by what `adopt_process_setup` takes over.
        self._num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = resolve_start_method(start_method)

    @property
    def checkpoint_io(self) -> Any:
        if self._checkpoint_io is None:
            self._checkpoint_io = self._default_checkpoint_io()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def setup_environment(self) -> None:
        super().setup_environment()
        self._set_world_ranks()
        self._start_together()
        self._setup_distributed()
        self._collectives = Collectives(self.root_device, timeout=self._timeout)
        self._split_graphs_in_forward(self._collectives.world_size)

    def _split_graphs_in_forward(self, world_size: int) -> None:
        # Fabric calls nothing of a strategy around a forward, but it enters this context of the precision's.
        of_precision = self.precision.forward_context

        @contextmanager
        def both() -> Iterator[None]:
            with graphs_split(self.config, world_size=world_size), of_precision():
                yield

        def forward_context() -> AbstractContextManager[None]:
            # Too late for a function that the user has compiled around the forward and that is being traced now.
            return of_precision() if torch.compiler.is_compiling() else both()

        self.precision.forward_context = forward_context  # type: ignore[method-assign]

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Make `module` the same on every rank and average its gradients from now on. It is not wrapped."""
        assert self._collectives is not None
        # Fabric does not say when an evaluation begins, so normalisation statistics are kept equal all the time.
        replicas = Replicas(module, self._collectives, defer_norm_statistics=False)
        if self._init_sync:
            replicas.agree()
            replicas.broadcast()
        # Fabric names a compiled module by what was compiled.
        self.reducers[getattr(module, "_orig_mod", module)] = Reducer(replicas, self.config)
        return module

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        with ExitStack() as scopes:
            for reducer in self._taking_part(module):
                scopes.enter_context(reducer.backward())
            super().backward(tensor, module, *args, **kwargs)

    def _taking_part(self, module: nn.Module | None) -> list[Reducer]:
        """The modules that certainly take part in a backward, even if this rank used none of their parameters.

        With several modules and none of them named, the hooks tell: a module that no rank used costs nothing then.
        """
        if module is not None:
            return [self.reducers[module]]
        return list(self.reducers.values()) if len(self.reducers) == 1 else []

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return all_gather(tensor, group=group, sync_grads=sync_grads)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write on rank zero; a failure is raised on every rank."""
        # On every rank: an optimizer may have to gather its state.
        checkpoint = self._convert_stateful_objects_in_state(state, filter=filter or {})
        write_on_rank_zero(
            lambda: self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options),
            self._collectives,
            path=path,
        )

    def teardown(self) -> None:
        for reducer in self.reducers.values():
            reducer.close()
        super().teardown()


class _BackwardSyncControl:
    """What `fabric.no_backward_sync` asks."""

    def __init__(self, strategy: FabricStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Backwards inside accumulate the gradients of `module` on this rank only."""
        return self._strategy.reducers[module].no_sync() if enabled else nullcontext()
