"""The base of the strategies for the Trainer and for Fabric: options, the start of a run, and its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import is_dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightning_bucketddp.checkpoint.async_writer import CheckpointStats, CheckpointWriter, FiniteCheckpoints
from lightning_bucketddp.comm.collectives import FILES_OF_COLLECTIVES, Collectives, all_gather
from lightning_bucketddp.comm.connections import SETTINGS, gloo_interface, more_sockets
from lightning_bucketddp.comm.process_group import SURVIVING_NCCL, TRIED_NCCL
from lightning_bucketddp.config import NAME_OF_DTYPE, ReducerConfig
from lightning_bucketddp.faults.progress import Progress
from lightning_bucketddp.faults.signals import StopSignals
from lightning_bucketddp.processes import rank_zero_info, variables_by_default
from lightning_bucketddp.reducer import quantization, reduction
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.sharding import bucket as sharded_bucket
from lightning_bucketddp.sharding.optimizer import gather_optimizer_state
from lightning_bucketddp.sharding.shards import Shards
from lightning_bucketddp.startup.rendezvous import Rendezvous
from lightning_bucketddp.startup.store import ChildProcesses, StoreAddress, is_on_this_host
from lightning_bucketddp.strategies.auto_resume import AutoResume
from lightning_bucketddp.strategies.fault_handling import FaultHandler
from lightning_bucketddp.strategies.launchers import HoldsPort
from lightning_bucketddp.strategies.options import StartMethod, StrategyOptions, check_devices, option_defaults
from lightning_bucketddp.wording import list_names, pluralize

_EXCHANGED_WITHIN_S = 0.5
# A thread that is in one of these files waits for other ranks. None of them calls functions of the user.
_FILES_OF_WAITS = (
    *FILES_OF_COLLECTIVES,
    *(str(module.__file__) for module in (reduction, quantization, sharded_bucket, torch.futures)),
)
# At its time-out NCCL ends the process without a message. Our time-out comes before it, names the rank that is behind,
# and lets callbacks save.
_LAST_RESORT = timedelta(seconds=15)
# Options that the log line at the start does not list: objects of Lightning, and what the line describes in words.
_NOT_LISTED = {
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin", "precision"),
    *("process_group_backend", "start_method", "overlap", "reduce_dtype", "ddp_comm_hook"),
}


class StrategyBase:
    """Checks options, has all ranks meet before any waits in a collective, and ends a run on all of them."""

    # Set by `bindings/`: the classes and functions that differ between the roots of Lightning.
    root: ClassVar[Any]
    # The checkpoint plugin; None: the user gave none, and ours is not made yet.
    _io: Any = None

    # Set in a process that has started the ranks and is not one of them: its weights are old.
    trains_elsewhere: bool = False
    # Set when the weights may have been changed by partial gradients (Note: partial step).
    has_partial_step: bool = False
    # `max_restarts`; None: a failure ends the run.
    restarts: Any = None
    # The store where the ranks have met, and may meet again; and the members by their launched ranks, if some are
    # missing. They belong to the process, because a program may have several Trainers.
    store: ClassVar[Any] = None
    members: ClassVar[list[int] | None] = None
    if TYPE_CHECKING:
        local_rank: int
        num_nodes: int
        num_processes: int
        root_device: torch.device
        cluster_environment: Any
        launcher: Any
        _launcher: Any
        _get_process_group_backend: Any

        @property
        def shards(self) -> Shards | None: ...  # the optimizers whose state is divided among the ranks

        def _active_reducers(self) -> list[Reducer]: ...

    def make_again(self) -> None:
        """Initialise this strategy, which was made for a Trainer, as the class that it is now."""
        options = {**self.options.given, "start_method": self._start_method}
        for name in options.keys() - option_defaults(type(self).__init__).keys():
            raise TypeError(
                f"`{name}` is an option of `BucketDDPStrategy` for the Trainer, and is not available with Fabric."
                f" Leave it out, or see `{type(self).__module__}.BucketDDPStrategy` for what there is."
            )
        vars(self).clear()
        self.__init__(**options)  # type: ignore[misc]

    def _take_options(self, arguments: dict[str, Any]) -> None:
        """Validate the `arguments` of `__init__`, and set the attributes that a run begins with."""
        self.options = options = StrategyOptions.of(arguments)
        self.config: ReducerConfig = options.reducer
        self._collectives: Collectives | None = None
        self._progress = Progress(waiting_in=_FILES_OF_WAITS)
        self._fault_handler: FaultHandler | None = None
        self._writer = CheckpointWriter()
        self._finite_checkpoints = FiniteCheckpoints()
        self._start_line = ""
        self._io = arguments["checkpoint_io"]
        # Read by what `adopt_process_setup` takes over.
        self._num_nodes = 1
        self._process_group_backend = options.process_group_backend
        self._timeout = options.timeout
        self._start_method: StartMethod = options.start_method
        self._ddp_options = arguments["ddp_options"]

    if not TYPE_CHECKING:  # Lightning's is a dictionary

        @property
        def _ddp_kwargs(self) -> Mapping[str, Any]:
            # Packages that have asked for a `DDPStrategy` read it. What they would write into it, nobody would read.
            return MappingProxyType(self._ddp_options)

    def _start_together(self) -> None:
        """Make the process group, once all ranks are there."""
        self._progress.begin_set_up()
        check_devices(self.root_device, *self.options.torch_devices)
        if self.restarts is not None:
            self.restarts.begin_attempt()
        listener = self.launcher.take_listener() if isinstance(self.launcher, HoldsPort) else None
        if torch.distributed.is_initialized():
            if listener is not None:
                listener.close()
            return
        environment = self.cluster_environment
        point = StoreAddress(
            address=environment.main_address,
            port=environment.main_port,
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            local_rank=environment.local_rank(),
            is_local=self._is_on_one_host,
            num_fits=0 if self.restarts is None else AutoResume.num_launches,
        )
        os.environ.update(MASTER_ADDR=point.address, MASTER_PORT=str(point.port))
        is_restart = self.restarts is not None and self.restarts.count > 0
        timeout_s = self.options.timeouts.start_s
        rendezvous = self.restarts.rendezvous(point) if is_restart else Rendezvous(point, timeout_s=timeout_s)
        launched = ChildProcesses(self.launcher, rank=point.rank, local_rank=point.local_rank)
        if listener is not None and not (point.is_host and listener.getsockname()[1] == point.port):
            listener.close()
            listener = None
        backend, timeout = self._get_process_group_backend(), self._timeout
        # A new process would begin with the first fit of the program, so processes are replaced in the first one only.
        of_failed_run = tuple(getattr(self.launcher, "children", ())) if is_restart and not point.num_fits else ()

        def find_failure() -> str | None:
            if of_failed_run:
                self.launcher.replace_ended(of_failed_run)
            return launched.find_failure(of_children=not is_restart or not self.options.max_restarts.min_ranks)

        with launched.ended_on_failure():
            # Where this process has met others; None: it has not.
            port = None if self.store is None else getattr(self.store.underlying_store, "port", None)
            earlier = self.store if is_restart or port == point.port else None
            store = rendezvous.meet(listener=listener, find_failure=find_failure, earlier=earlier)
            StrategyBase.store = store
            if self.restarts is not None:
                self.restarts.set_members(rendezvous.ranks, num_launched=point.world_size)
            point = replace(point, rank=rendezvous.ranks.index(point.rank), world_size=len(rendezvous.ranks))
            store.set_timeout(timeout or default_pg_timeout)
            if "nccl" in backend and timeout is not None:
                timeout += _LAST_RESORT
            device = None if self.root_device.type == "cpu" else self.root_device
            of_group = {"store": store, "timeout": timeout, "device_id": device}
            with self._nccl_settings(backend, store, point), gloo_interface(on_one_host=self._is_on_one_host):
                self.root.init_dist_connection(environment, backend, point.rank, point.world_size, **of_group)

    @contextmanager
    def _nccl_settings(self, backend: str, store: Any, point: StoreAddress) -> Iterator[None]:
        """Set the variables that NCCL reads while the group is made inside; connect the group if it reads them then."""
        if "nccl" not in backend:
            yield
            return
        chosen = {} if self.options.process_group_backend else TRIED_NCCL
        settings = chosen if self.restarts is None else chosen | SURVIVING_NCCL
        more = more_sockets(store, rank=point.rank, world_size=point.world_size)
        with variables_by_default(settings), more as num_hosts:
            if num_hosts > 0:
                sockets = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
                rank_zero_info(
                    f"bucketddp: {sockets}, because NCCL sends through sockets between {num_hosts} hosts. Set one of"
                    " them yourself, and both are left as you want them."
                )
            yield
            if num_hosts > 0:
                torch.distributed.all_reduce(torch.zeros(1, device=self.root_device))

    @property
    def _is_on_one_host(self) -> bool:
        return is_on_this_host(self.cluster_environment.main_address, num_nodes=self._num_nodes)

    def _new_collectives(self) -> Collectives:
        return Collectives(self.root_device, timeout=self._timeout, on_one_host=self._is_on_one_host)

    def _log_start(self, reducer: Reducer | None = None) -> None:
        """Log what was chosen, unless the last run of this strategy began with the same line."""
        line = _describe_start(self, backend=self._get_process_group_backend(), reducer=reducer)
        if line != self._start_line:
            self._start_line = line
            rank_zero_info(line)

    @property
    def accelerator(self) -> Any:
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        # A Trainer or Fabric sets this first. The class of the accelerator shows which root of Lightning it is from.
        self.root.follow_root(self, accelerator)
        self._accelerator = accelerator

    @property
    def signals(self) -> StopSignals | None:
        return None if self._fault_handler is None else self._fault_handler.signals

    def gather_json(self, value: Any) -> list[Any]:
        """Return this JSON value of every rank, by rank."""
        assert self._collectives is not None  # a run has begun
        return self._collectives.gather_json(value)

    @property
    def global_rank(self) -> int:
        rank: int = super().global_rank  # type: ignore[misc]
        return rank if self.members is None else self.members.index(rank)

    @property
    def world_size(self) -> int:
        return super().world_size if self.members is None else len(self.members)  # type: ignore[misc]

    def end_run(self) -> None:
        """Do what follows a launch that has ended well, when no progress bar is on the screen any more."""

    @property
    def differs_by_design(self) -> bool:
        """Whether replicas may differ between two averages (post-localSGD)."""
        return isinstance(self.config.comm_state, PostLocalSGDState)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Return `tensor` of every rank, stacked by rank."""
        return all_gather(tensor, group=group, sync_grads=sync_grads)

    def new_shards(self) -> Shards | None:
        option = self.options.shard_optimizer
        if not option or self._collectives is None or self._collectives.world_size == 1:
            return None
        return Shards(self._collectives, whole_parameters=option == "parameters")

    def is_divided(self, param: Tensor) -> bool:
        return self.shards is not None and self.shards.divides(param)

    def full_gradient(self, param: torch.nn.Parameter) -> Tensor | None:
        """Return all of the averaged gradient of `param`, also with `shard_optimizer`. All ranks must call this."""
        return param.grad if self.shards is None else self.shards.full_gradient(param)

    def _sharded_state(self, optimizer: Any) -> dict[str, Any] | None:
        """Return the state of `optimizer`, all of it, on rank zero, if it is divided; None: it is not."""
        sharded = None if self.shards is None else self.shards.of(optimizer)
        if sharded is None:
            return None
        # Without the other ranks it cannot be gathered (`has_lost_shards`).
        return {} if self.has_lost_shards else gather_optimizer_state(sharded)

    @property
    def has_lost_shards(self) -> bool:
        """Whether optimizer state is divided among ranks that cannot be reached any more."""
        is_divided = self.shards is not None and bool(self.shards.optimizers)
        return is_divided and (self._collectives is None or not self._collectives.is_open)

    @property
    def has_partial_weights(self) -> bool:
        """Whether the weights are not those of any step (Note: partial step)."""
        return self.has_partial_step or (self.shards is not None and self.shards.is_partial)

    @property
    def checkpoint_io(self) -> Any:
        if self._io is None:
            self._io = self.root.checkpoint_io()
        elif isinstance(self._io, self.root.wrapping_checkpoint_io):
            # Ignored by a wrapper that already has something to wrap.
            self._io.checkpoint_io = self.root.checkpoint_io()
        return self._io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._io = io

    @property
    def checkpoint_stats(self) -> CheckpointStats:
        """How long checkpoints took in this run, on rank zero."""
        return self._writer.stats

    def launched(self, trainer: Any, function: Callable[..., Any], args: Any) -> AbstractContextManager[None]:
        """Return the context of a launch of `function(*args)`; `trainer` is None with Fabric."""
        return nullcontext()

    def _configure_launcher(self) -> None:
        if self._start_method == "popen":
            environment = self.cluster_environment
            self._launcher = self.root.script_launcher(environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = self.root.process_launcher(self, start_method=self._start_method)
        self._launcher.guarding_strategy = self

    def _begin_watching(self) -> FaultHandler:
        self._fault_handler = FaultHandler(self)
        self._fault_handler.begin()
        return self._fault_handler

    def _end_watching(self) -> None:
        if self._fault_handler is not None:
            self._fault_handler.end()
            self._fault_handler = None

    def directory_to_save_in(self) -> str | None:
        """Return where this run saves if it fails; None: nowhere, or on no disk."""
        return None

    def note_partial_step(self) -> None:
        """Note whether an abort will interrupt an exchange of gradients on the device (Note: partial step)."""
        deadline = time.monotonic() + _EXCHANGED_WITHIN_S
        reducers = self._active_reducers()
        while not all(reducer.has_exchanged for reducer in reducers) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.has_partial_step |= not all(reducer.has_exchanged for reducer in reducers)

    def release_graphs(self) -> None:
        """Release CUDA graphs that hold collectives. Another thread than the one that trains may call this."""

    @contextmanager
    def ending_all_ranks(self, *reducers: Reducer) -> Iterator[None]:
        """Run a backward of `reducers` inside; if it raises, all ranks end, even if a user catches the error."""
        try:
            yield
        except BaseException as error:
            if any(reducer.has_failed for reducer in reducers) or self._progress.was_waiting(error):
                self.end_run_by(error)
            raise

    def explain_own_gradients(self, optimizer: Optimizer, *, remedy: str) -> str | None:
        """Return why `optimizer` should not step with its gradients; None: all of them are averaged."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        names = [name for reducer in self._active_reducers() for name in reducer.own_gradients(params)]
        if not names:
            return None
        return (
            f"`{type(optimizer).__name__}` steps with gradients that were not averaged over the ranks, of"
            f" {list_names(names)}: the strategy was not told of their backward, as with `loss.backward()`. Call"
            f" `{remedy}`, or set gradients to None before the backward that the step is for."
        )

    def end_run_by(self, error: BaseException) -> None:
        """End the run on all ranks, because it ends on this one by `error`. Raises if another rank was the cause."""
        if isinstance(error, self.root.normal_ends):
            self._end_watching()
        elif self._fault_handler is not None:
            instead = self._fault_handler.end_by(error, sigterm_exception=self.root.sigterm_exception)
            if instead is not None:
                raise instead from None  # the error itself is only a connection that broke


def _describe_start(strategy: StrategyBase, *, backend: str, reducer: Reducer | None) -> str:
    """Return what was chosen for a run; without a `reducer` it is not known yet what will train."""
    options, given, num_nodes = strategy.options, strategy.options.given, strategy._num_nodes
    ranks = pluralize(strategy.world_size, "rank") + (f" on {num_nodes} nodes" if num_nodes > 1 else "")
    started = "" if options.start_method == "popen" else f", started by {options.start_method}"
    parts = [f"{ranks} ({backend}{started})"]
    if strategy.world_size == 1:
        parts.append("no gradients to exchange")
    else:
        wire = _describe_wire(options.reducer, reducer)
        gradients = "gradients" if reducer is None else reducer.plans.describe_outlook()
        parts += [f"{gradients} sent{wire}"] if wire else []
    listed = [name for name in given if name not in _NOT_LISTED and name not in options.without_effect]
    parts += [", ".join(f"{name}={_describe_value(given[name])}" for name in listed)] if listed else []
    parts += [f"no effect: {', '.join(options.without_effect)}"] if options.without_effect else []
    return f"bucketddp: {'; '.join(parts)}."


def _describe_wire(config: ReducerConfig, reducer: Reducer | None) -> str:
    when = "" if config.overlap else " after backward"
    if config.comm_hook is not None:
        return f" by `{_describe_value(config.comm_hook)}`{when}"
    params = [] if reducer is None else reducer.replicas.parameters.values()
    dtypes = [param.dtype for param in params if param.requires_grad]
    own = [NAME_OF_DTYPE.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dict.fromkeys(dtypes)]
    named = config.reduce_dtype or " and ".join(own)
    return f" as {named}{when}" if named else when


def _describe_value(value: object) -> str:
    if value is None or is_dataclass(value) or isinstance(value, bool | int | float | str | list | tuple):
        return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)
