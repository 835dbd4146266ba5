"""`BucketDDPStrategy` for Fabric, less its Lightning base class."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import Unpack

from lightning_bucketddp.checkpoint.async_writer import Severities, nonfinite_weights, severities_of
from lightning_bucketddp.checkpoint.checkpoint_io import CheckpointWriteError, read_on_every_rank, write_on_rank_zero
from lightning_bucketddp.comm.step_exchange import StepExchange
from lightning_bucketddp.config import AUTO, ReplicaChecks, Timeouts
from lightning_bucketddp.data.evaluation import Part, divided, is_even
from lightning_bucketddp.faults.progress import BACKWARD, OPTIMIZER, SAVING
from lightning_bucketddp.processes import rank_zero_info
from lightning_bucketddp.reducer.grad_hooks import refuse_gradients
from lightning_bucketddp.reducer.nonfinite import (
    Finiteness,
    StepWithheld,
    drop_gradients,
    scaler_of,
    withhold_nonfinite,
)
from lightning_bucketddp.reducer.observer import graphs_split
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.consistency import ReplicaComparison, TrainingState, training_state
from lightning_bucketddp.replicas.replicas import Replicas, SharedBuffers, unwrapped
from lightning_bucketddp.sharding.shards import ShardOption, Shards
from lightning_bucketddp.strategies.base import StrategyBase
from lightning_bucketddp.strategies.exact_evaluation import common_seed
from lightning_bucketddp.strategies.fault_handling import explain_unsaved
from lightning_bucketddp.strategies.options import DDPOptions, StartMethod
from lightning_bucketddp.trainer_internals import convert_to_state

if TYPE_CHECKING:
    from lightning.fabric.strategies.ddp import DDPStrategy as _ParallelStrategy
else:
    _ParallelStrategy = object


class FabricStrategy(StrategyBase, _ParallelStrategy):
    """Data-parallel training with its own gradient bucketing, for Fabric.

    Takes the keywords of Fabric's `DDPStrategy` and of torch's `DistributedDataParallel`.

    Args:
        ddp_comm_state: State for `ddp_comm_hook`.
        ddp_comm_hook: A communication hook as torch DDP takes it. Runs on every backend.
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
        timeouts: How many seconds ranks wait for each other at the start, and for one that is stuck.
        async_checkpoints: Write checkpoints while training goes on. A failure is raised by the next save or load, or
            by `fabric.strategy.wait_for_checkpoints()`, which belongs at the end of the program.
        replica_checks: After how many steps the ranks compare their weights and optimizer state, beside the comparison
            before each checkpoint; None: only then. A `ReplicaChecks` also sets what to do if they differ.
        on_nonfinite: What to do in a step in which a loss or a gradient is infinite or nan on some rank: `warn` and go
            on, `raise` on every rank, or `skip` the optimizer's step on every rank; None: look for neither.
        **ddp_options: Other keywords of torch's `DistributedDataParallel` (`DDPOptions`).
    """

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: float | timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        *,
        ddp_comm_state: object = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        bucket_cap_mb: float | list[float] | Literal["auto"] | None = AUTO,
        overlap: bool = True,
        reduce_dtype: Literal["fp32", "bf16", "fp16", "int8"] | torch.dtype | None = None,
        shard_optimizer: ShardOption = False,
        timeouts: Timeouts = Timeouts(),
        async_checkpoints: bool = False,
        replica_checks: ReplicaChecks | int | None = 100,
        on_nonfinite: Literal["warn", "raise", "skip"] | None = "warn",
        **ddp_options: Unpack[DDPOptions],
    ) -> None:
        arguments = dict(locals())
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision)
        self._take_options(arguments)
        self.reducers: dict[nn.Module, Reducer] = {}
        self._shared_buffers: dict[nn.Module, SharedBuffers] = {}
        self._copies: set[weakref.ref[nn.Module]] = set()  # of modules that were set up; `WeakSet` cannot be pickled
        self._checks: ReplicaComparison | None = None
        self._optimizers: list[Optimizer] = []
        self.shards: Shards | None = None
        self._weights_at_start: dict[nn.Module, Severities] = {}
        self._backward_sync_control: Any = self  # `fabric.no_backward_sync` asks it

    def setup_environment(self) -> None:
        if self._launcher is None:
            self._configure_launcher()  # as Fabric does; the launcher knows how ranks have ended
        super().setup_environment()
        self._set_world_ranks()
        self._start_together()
        self._setup_distributed()
        if self.world_size > 1:
            self._progress.enter("the training loop")
            ending = self._begin_watching()
            ending.handle_end_of_program()
            # Fabric has no hook for the end of a run.
            weakref.finalize(self, ending.end)
        self._collectives = self._new_collectives()
        # Not at the end of the process, which closes connections anyway and must not wait.
        weakref.finalize(self, self._collectives.close_host_groups).atexit = False
        self.shards = self.new_shards()
        self._act_before_forward(self._collectives.world_size)
        self._log_start()

    def _act_before_forward(self, world_size: int) -> None:
        # Fabric has no hook of a strategy around a forward, but it enters this context of the precision plugin.
        of_precision = self.precision.forward_context

        @contextmanager
        def both() -> Iterator[None]:
            for reducer in self.reducers.values():
                reducer.give_back_memory()
            with graphs_split(self.config, world_size=world_size), of_precision():
                yield

        def forward_context() -> AbstractContextManager[None]:
            # In a function that the user has compiled around the forward, and that is traced now, this is too late.
            return of_precision() if torch.compiler.is_compiling() else both()

        self.precision.forward_context = forward_context  # type: ignore[method-assign]

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Make `module` the same on every rank, average its gradients, and wrap it if ranks share its buffers."""
        assert self._collectives is not None
        replicas = Replicas(module, self._collectives)
        replicas.agree()
        if self.options.init_sync:
            replicas.broadcast(buffers=self.options.init_sync_buffers)
        if not self.reducers and self._collectives.world_size > 1 and not self.differs_by_design:
            checks, exchange = self.options.replica_checks, StepExchange(self._collectives)
            self._checks = ReplicaComparison(self._collectives, checks, exchange=exchange, has_messages=False)
        finiteness = Finiteness(replicas, self.config, has_scaler=scaler_of(self.precision) is not None)
        compiled = unwrapped(module)
        if (previous := self.reducers.get(compiled)) is not None:
            previous.close()
            if self.shards is not None:
                self.shards.forget(set(module.parameters()))
        reducer = Reducer(replicas, self.config, maker=self.shards, finiteness=finiteness, report=rank_zero_info)
        self.reducers[compiled] = reducer
        self._weights_at_start[compiled] = severities_of(compiled)
        self._shared_buffers.pop(compiled, None)
        if self.options.broadcast_buffers and self._collectives.world_size > 1 and replicas.buffers():
            self._shared_buffers[compiled] = SharedBuffers(module, replicas, lambda: reducer.is_synchronised)
        return self._shared_buffers.get(compiled, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> FabricStrategy:
        """Return this strategy for a copy of a module that was set up, which computes, but has no reducer."""
        copies = [memo[id(it)] for it in (*self.reducers, *(ref() for ref in tuple(self._copies))) if id(it) in memo]
        # Without attributes: the copy is not complete, because the module itself, not what Fabric returned, is copied.
        for module in [module for module in copies if vars(module) and self.world_size > 1]:
            kind = type(module).__name__
            self._copies.add(weakref.ref(module, self._copies.discard))
            refuse_gradients(
                module.parameters(),
                f"This `{kind}` is a copy of a module that `fabric.setup` has returned, and its gradients are not"
                " averaged over the ranks. To train it, pass its `.module` to `fabric.setup`; otherwise freeze it, or"
                " call it within `torch.no_grad()`.",
            )
        return self

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Compare the state of `optimizer` between the ranks from now on, or divide it among them."""
        if _is_optimizer(optimizer):
            if self.shards is not None and self.shards.of(optimizer) is None:
                self.shards.add(optimizer)
            self._optimizers.append(optimizer)
        return super().setup_optimizer(optimizer)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of `optimizer` for a checkpoint: with `shard_optimizer` all of it, on rank zero."""
        state = self._sharded_state(optimizer)
        return super().get_optimizer_state(optimizer) if state is None else state

    def exact_dataloader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return `loader` for `fabric.setup_dataloaders`, so that every sample is evaluated once, by one of the ranks.

        All ranks get the same number of batches if there are enough samples to split; otherwise, and with your own
        batch sampler, whose batches are not split, some get one less. Call it on all ranks, after `fabric.launch()`.
        """
        if self._collectives is None:
            raise RuntimeError("`exact_dataloader` divides data among the ranks, so call `fabric.launch()` before.")
        is_stream = isinstance(loader.dataset, IterableDataset)
        if is_stream or is_even(loader):
            found = "a stream" if is_stream else "what its sampler has divided already"
            raise ValueError(f"`exact_dataloader` divides samples among the ranks, and cannot divide {found}.")
        rank, world_size = self._collectives.rank, self._collectives.world_size
        part = Part(rank, world_size, seed=common_seed(self._collectives), repeats=False)
        exact: DataLoader[Any] = divided(loader, part)
        return exact

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if self._checks is not None:
            num_backwards = sum(reducer.stats.num_backwards for reducer in self.reducers.values())
            self._checks.between_steps(self._trained_state, num_backwards=num_backwards)
        # As with `ddp`, also those that are not named; gradients show which take part: unused modules cost nothing.
        named = None if module is None else unwrapped(module)
        if len(self.reducers) == 1:
            [named] = self.reducers
        if self.shards is not None:
            self.shards.begin_backward()  # all ranks call this, whatever modules take part
        begun: list[Reducer] = []
        with ExitStack() as scopes:
            scopes.enter_context(self._progress.during(BACKWARD))
            scopes.enter_context(self.ending_all_ranks(*self.reducers.values()))
            for of_module, reducer in self.reducers.items():
                scopes.enter_context(reducer.backward(takes_part=of_module is named, begun=begun))
            super().backward(tensor, module, *args, **kwargs)
            for reducer in begun:
                reducer.finiteness.check_loss(tensor)
            if named is not None and (shared := self._shared_buffers.get(named)) is not None:
                shared.end_backward(has_gradients=self.reducers[named].has_gradients)
            if len(begun) > 1:
                begun[0].launch_rest()

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Accumulate the gradients of `module` on this rank only, in backwards that run inside."""
        reducer = self.reducers.get(unwrapped(module))  # None: it is a copy
        return reducer.no_sync() if enabled and reducer is not None else nullcontext()

    def _active_reducers(self) -> list[Reducer]:
        return list(self.reducers.values())

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        checks = [reducer.finiteness for reducer in self.reducers.values()]

        def closure_or_withheld() -> Any:
            loss = closure() if closure is not None else None
            if (reason := self.explain_own_gradients(optimizer, remedy="fabric.backward(loss)")) is not None:
                raise RuntimeError(reason)
            withhold_nonfinite(optimizer, checks)
            return loss

        if not _is_optimizer(optimizer):
            return super().optimizer_step(optimizer, **kwargs)
        with self._progress.during(OPTIMIZER):
            try:
                if closure is not None:
                    return super().optimizer_step(optimizer, closure=closure_or_withheld, **kwargs)
                closure_or_withheld()
                return super().optimizer_step(optimizer, **kwargs)
            except StepWithheld:
                drop_gradients(optimizer, self.precision)
                return None

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write on rank zero; a failure is raised on every rank."""
        divided_states = [] if self.shards is None else [self.shards.of(value) for value in state.values()]
        with_optimizers = any(found is not None for found in divided_states)
        if (why_not := explain_unsaved(self, path, with_optimizers=with_optimizers)) is not None:
            raise CheckpointWriteError(why_not)
        if self._checks is not None and self._collectives is not None and self._collectives.is_open:
            self._checks.compare(self._trained_state, when=f"before checkpoint `{path}` is written")
        # All ranks do this, because an optimizer may have to gather its state.
        checkpoint = convert_to_state(self, state, filter=filter or {})

        def save() -> None:
            nonfinite = [
                weight
                for name, value in state.items()
                if isinstance(value, nn.Module) and (module := unwrapped(value)) in self._weights_at_start
                for weight in nonfinite_weights(checkpoint[name], module, at_start=self._weights_at_start[module])
            ]
            place = self._finite_checkpoints.place(path, nonfinite, refuses=not self.config.trains_on)

            def write(content: dict[str, Any]) -> None:
                with self._finite_checkpoints.known_unless_failing(place):
                    self.checkpoint_io.save_checkpoint(content, place, storage_options=storage_options)

            self._writer.save(checkpoint, write, path=place, in_background=self.options.async_checkpoints)

        with self._progress.during(SAVING):
            write_on_rank_zero(save, self._collectives, path=path)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return super().get_module_state_dict(unwrapped(module))

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(unwrapped(module), state_dict, strict=strict)

    def wait_for_checkpoints(self) -> None:
        """Wait until all checkpoints are written; a failure is raised on every rank. All ranks must call this."""
        write_on_rank_zero(self._writer.drain, self._collectives)

    def load_checkpoint(  # type: ignore[override]
        self, path: Any, state: Any = None, strict: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        """Load a checkpoint into `state`, once all ranks have read the same one."""
        own_io, collectives = self.checkpoint_io, self._collectives
        # Unlike `fabric.load`, one rank may call `fabric.load_raw` alone.
        if collectives is not None and not isinstance(state, nn.Module | Optimizer):
            if self.options.async_checkpoints:
                self.wait_for_checkpoints()

            def read(path: Any, **kwargs: Any) -> dict[str, Any]:
                return read_on_every_rank(lambda: own_io.load_checkpoint(path, **kwargs), collectives, path=path)

            self._io = SimpleNamespace(load_checkpoint=read)  # for Fabric's code, which distributes the content
        try:
            rest = super().load_checkpoint(path, state, strict, **kwargs)
        finally:
            self._io = own_io
        # Training begins again with the loaded weights.
        loaded = list(state.values()) if isinstance(state, dict) else [state]
        for module in self._weights_at_start:
            if any(isinstance(other, nn.Module) and module is unwrapped(other) for other in loaded):
                self._weights_at_start[module] = severities_of(module)
        return rest

    def _trained_state(self) -> TrainingState:
        """Return the state of all modules and optimizers; names of parameters begin with their module, if several."""
        parameters = {
            f"module {index}: {name}" if len(self.reducers) > 1 else name: param
            for index, reducer in enumerate(self.reducers.values())
            for name, param in reducer.replicas.parameters.items()
        }
        return training_state(parameters, self._optimizers, is_divided=self.is_divided)

    def teardown(self) -> None:
        for reducer in self.reducers.values():
            reducer.close()
        with suppress(Exception):  # it is in the log
            self._writer.drain()
        super().teardown()


def _is_optimizer(optimizer: Any) -> bool:
    """Return whether this is no scheduler, which `fabric.setup` takes by position and wraps as an optimizer, too."""
    return hasattr(optimizer, "param_groups")
