"""Start the processes of a run as Lightning does, and make sure that all of them end."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

from lightning_bucketddp.comm.connections import connection_ids, cut_all_connections
from lightning_bucketddp.faults.failure import RankFailedError, ShortTracebacks, shorten_relayed
from lightning_bucketddp.processes import end_openmp_threads, end_with_status, variables_by_default, working_directory
from lightning_bucketddp.startup.store import LAUNCHER_PID, describe_end, is_on_this_host, listen
from lightning_bucketddp.trainer_internals import processes_started_by, set_main_port
from lightning_bucketddp.wording import wrap

if TYPE_CHECKING:
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
else:
    # Each root of Lightning has launchers of its own: they come after these classes in the bases.
    _MultiProcessingLauncher = _SubprocessScriptLauncher = object


class HoldsPort:
    """A launcher that opens the main port before it launches processes.

    Lightning finds a free port and closes it until rank 0 opens it again; meanwhile another program may take it.
    """

    guarding_strategy: Any
    _listener: socket.socket | None = None

    def take_listener(self) -> socket.socket | None:
        """Return the socket that was opened at the main port, or None. The caller closes it."""
        listener, self._listener = self._listener, None
        return listener

    def _open_port(self, environment: Any) -> None:
        """Keep a free port open for rank 0; only check a port that the user has chosen."""
        # The environment that Lightning uses where no scheduler chooses the port.
        is_ours_to_choose = type(environment) is self.guarding_strategy.root.lightning_environment
        if not is_ours_to_choose or environment.creates_processes_externally or environment.node_rank() != 0:
            return
        is_local = is_on_this_host(environment.main_address, num_nodes=self.guarding_strategy._num_nodes)
        address = environment.main_address if is_local else None
        if "MASTER_PORT" in os.environ:
            # Not kept: a launcher that is not rank 0 could not know when to close it.
            listen(environment.main_port, address=address).close()
            return
        self._listener = listen(int(os.environ.get("STANDALONE_PORT", 0)), address=address)
        set_main_port(environment, self._listener.getsockname()[1])


@contextmanager
def launching(*restored: str) -> Iterator[None]:
    """Set the variables for processes that are launched inside; then restore them and the variables `restored`."""
    before = {name: os.environ.get(name) for name in (LAUNCHER_PID, *restored)}
    os.environ[LAUNCHER_PID] = str(os.getpid())
    try:
        # Otherwise, when the rank with the store dies, torch prints C++ frames on all other ranks.
        with variables_by_default({"TORCH_CPP_LOG_LEVEL": "ERROR"}):
            yield
    finally:
        for name in before:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


log = logging.getLogger(__name__)

_CHILDREN_END_WITHIN_S = 3.0
# As a shell reports a process that SIGINT has ended.
_INTERRUPTED = 128 + signal.SIGINT
_STOPPED = (_INTERRUPTED, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class Guarded:
    """A function that notifies its strategy how it has ended. It can be pickled for another process."""

    function: Callable[..., Any]
    strategy: Any
    on_exception: Callable[[BaseException], None] | None = None  # where Lightning does not call its own handlers
    in_child: bool = False  # another process waits for the end of this one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.strategy.trains_elsewhere = False
        ShortTracebacks.uninstall()
        if self.in_child:
            _unshare_metrics([*args, *kwargs.values()])
        try:
            attempt, restarts = partial(self._run, *args, **kwargs), self.strategy.restarts
            return attempt() if restarts is None else restarts.run(attempt)
        except BaseException as error:
            if not self.in_child:
                ShortTracebacks.install()
            if self.on_exception is not None:
                try:
                    self.on_exception(error)
                except Exception as failure:
                    # The waiting process shows how one rank has ended, which may be another one.
                    log.error(wrap(f"bucketddp: a callback has failed when the run was over: {failure}"))
                    raise
            # If this process ended with 0, as torch ends it after Ctrl-C, the parent would wait for a result for ever.
            if self.in_child and isinstance(error, KeyboardInterrupt):
                raise SystemExit(_INTERRUPTED) from None
            if self.in_child and isinstance(error, SystemExit) and not error.code:
                where = self.strategy._progress.describe_origin(error)
                log.error(wrap(f"bucketddp: rank {self.strategy.global_rank} has called `sys.exit()` in {where}."))
                raise SystemExit(1) from None
            if self.in_child and isinstance(error, RankFailedError):
                # torch shows the arguments of this error, if it is the first.
                error.args = (f"{error}{error.stack}",)
            raise

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self.function(*args, **kwargs)
            self.strategy.end_run()
            return result
        except BaseException as error:
            self.strategy.end_run_by(error)
            raise


def _unshare_metrics(arguments: list[Any]) -> None:
    """Give this process states of its own: torch spawns with shared memory, and Lightning copies weights alone."""
    from torchmetrics import Metric

    modules = [module for argument in arguments if isinstance(argument, nn.Module) for module in argument.modules()]
    for metric in modules:
        for name in metric._defaults if isinstance(metric, Metric) else ():
            if isinstance(state := getattr(metric, name), Tensor):
                setattr(metric, name, state.clone())


class SavedPredictions:
    """Predictions in a file, for the process that has launched the ranks.

    Lightning's queue for results would block: it is read only after the ranks have ended.
    """

    def __init__(self, predictions: Any) -> None:
        with tempfile.NamedTemporaryFile(prefix="bucketddp-predictions-", delete=False) as file:
            torch.save(predictions, file)
            self._file = _identity(file)
        self._path = file.name

    def take(self) -> Any:
        """Return the predictions, and remove the file."""
        with open(self._path, "rb") as file:
            os.unlink(self._path)
            if _identity(file) != self._file:
                raise PermissionError(f"`{self._path}` is not the file that rank zero wrote: another has its name.")
            return torch.load(file, weights_only=False)


def _identity(file: Any) -> tuple[int, int, int]:
    """Return an identity of an open file that no file of another user has."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_uid


class ReplaceableProcesses(ProcessContext):
    """The processes of all ranks, as torch starts them; `at_most` so many times one that died is replaced.

    They are replaced as long as none has ended well. A process that has raised ends the run instead.
    """

    def __init__(
        self, function: Callable[..., None], args: Any, nprocs: int, start_method: str, *, join: bool, at_most: int
    ) -> None:
        assert not join  # Lightning joins them
        self._start = partial(_start_rank, function, args, start_method)
        started = [self._start(rank) for rank in range(nprocs)]
        super().__init__([it.processes[0] for it in started], [it.error_files[0] for it in started])  # type: ignore[no-untyped-call]
        self._num_left = at_most

    def join(self, timeout: float | None = None, *args: Any, **options: Any) -> bool:  # torch 2.5 has no `grace_period`
        ended = multiprocessing.connection.wait(self.sentinels, timeout=timeout)
        for rank, sentinel in sorted((self.sentinels[sentinel], sentinel) for sentinel in ended):
            self.processes[rank].join()
            status, has_raised = self.processes[rank].exitcode, os.path.exists(self.error_files[rank])
            has_died = status not in (0, *_STOPPED) and not has_raised
            if has_died and self._num_left > 0 and all(process.exitcode != 0 for process in self.processes):
                self._num_left -= 1
                started = self._start(rank)
                self.processes[rank], self.error_files[rank] = started.processes[0], started.error_files[0]
                del self.sentinels[sentinel]
                self.sentinels[self.processes[rank].sentinel] = rank
                text = "bucketddp: process %d takes the place of rank %d, which ended with status %d."
                log.warning(text, self.processes[rank].pid, rank, status)
                return False
        return bool(super().join(timeout, *args, **options))


def _start_rank(function: Callable[..., None], args: Any, start_method: str, rank: int) -> ProcessContext:
    arguments = (rank, function, *args)
    started: ProcessContext = start_processes(_run_as_rank, arguments, 1, False, start_method=start_method)  # type: ignore[no-untyped-call]
    return started


def _run_as_rank(_: int, rank: int, function: Callable[..., None], *args: Any) -> None:
    function(rank, *args)


class ProcessLauncher(HoldsPort, _MultiProcessingLauncher):
    """Starts a process for each rank of this host; this process only waits for them."""

    # Calls `on_exception` of a Trainer's callbacks in the ranks. Lightning calls them in the waiting process.
    on_exception_of: Callable[[Any, BaseException], None] | None = None

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        strategy = self.guarding_strategy
        on_exception = None if self.on_exception_of is None else partial(self.on_exception_of, kwargs["trainer"])
        strategy.trains_elsewhere = True
        try:
            guarded = Guarded(function, strategy, on_exception, in_child=True)
            # `MASTER_PORT` is restored, so that the next launch of this program chooses another port.
            with strategy.launched(kwargs.get("trainer"), function, args), launching("MASTER_PORT"):
                self._open_port(strategy.cluster_environment)
                if strategy.options.start_method == "fork" and not end_openmp_threads() and torch.get_num_threads() > 1:
                    why = "forked ranks hang where they compute with several threads, if this process has done so"
                    log.warning(wrap(f"bucketddp: before torch 2.7, {why}. Call `torch.set_num_threads(1)` first."))
                at_most = strategy.options.max_restarts.number
                replacing = partial(ReplaceableProcesses, at_most=at_most)
                try:
                    with processes_started_by(replacing, self) if at_most else nullcontext():
                        result = super().launch(guarded, *args, **kwargs)
                finally:
                    if (listener := self.take_listener()) is not None:
                        listener.close()
        except (KeyboardInterrupt, ProcessException) as error:
            if isinstance(error, ProcessException) and getattr(error, "exit_code", None) != _INTERRUPTED:
                shorten_relayed(error)
                ShortTracebacks.install()
                raise
            # Ctrl-C in a terminal reaches all processes, a signal sent to this one does not.
            self._end_processes(signal.SIGINT)
            raise KeyboardInterrupt from None
        strategy.trains_elsewhere = False
        return result.take() if isinstance(result, SavedPredictions) else result

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        output = super()._collect_rank_zero_results(trainer, results)
        if output is None or results is None or trainer.state.fn != "predict":
            return output
        return output._replace(trainer_results=SavedPredictions(results))

    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        folders = [getattr(callback, "recorded_in", None) for callback in trainer.callbacks]
        return {**super().get_extra_results(trainer), "folders": folders}

    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        # Ranks record steps, and this process shows the page.
        for callback, folder in zip(trainer.callbacks, extra.pop("folders"), strict=False):
            if folder is not None:
                callback.recorded_in = folder
        super().update_main_process_results(trainer, extra)

    def _end_processes(self, number: int) -> None:
        running = [process for process in self.procs if process.is_alive()]
        for process in running:
            assert process.pid is not None  # it runs
            os.kill(process.pid, number)
        # They end by themselves after they have saved. Another Ctrl-C ends the waiting.
        try:
            deadline = time.monotonic() + _CHILDREN_END_WITHIN_S
            for process in running:
                process.join(max(deadline - time.monotonic(), 0))
            if any(process.is_alive() for process in running):
                log.warning("bucketddp: waiting until all ranks have ended; another Ctrl-C kills them.")
            for process in running:
                process.join()
        finally:
            for process in running:
                process.kill()


@dataclass
class Children:
    """The processes of further ranks of this host. This process ends with status 1 if one of them fails."""

    processes: list[subprocess.Popen[bytes]]
    first_rank: int
    environment: dict[str, str]
    directory: str
    connections_before: set[int]  # of this process, before there were other ranks
    strategy: Any  # the class, which knows the `members` of the run
    has_failed: bool = False  # this process has raised an error itself, which explains more

    def replace_ended(self, processes: Sequence[Any]) -> None:
        """Start a new process for each rank whose process is one of `processes`, and has ended."""
        for index, process in enumerate(self.processes):
            if process in processes and process.poll() is not None:
                environment = {**self.environment, "LOCAL_RANK": str(index + 1)}
                self.processes[index] = subprocess.Popen(process.args, env=environment, cwd=self.directory)
                rank = self.first_rank + index + 1
                log.warning("bucketddp: process %d takes the place of rank %d.", self.processes[index].pid, rank)

    def wait_at_exit(self) -> None:
        """Cut all connections, so that no rank waits for this process, and wait until all children have ended."""
        cut_all_connections(but=self.connections_before)
        for rank, process in enumerate(self.processes, start=self.first_rank + 1):
            if process.wait() != 0 and (self.strategy.members is None or rank in self.strategy.members):
                end_with_status(1)
                if not self.has_failed:
                    log.error(wrap(f"bucketddp: {describe_end(rank, process)}"))


class ScriptLauncher(HoldsPort, _SubprocessScriptLauncher):
    """Runs the script again for each further rank of this host."""

    _children: Children | None = None

    @property
    def children(self) -> Sequence[subprocess.Popen[bytes]]:
        """The processes that this one has started."""
        return () if self._children is None else self._children.processes

    def replace_ended(self, processes: Sequence[Any]) -> None:
        if self._children is not None:
            self._children.replace_ended(processes)

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        strategy = self.guarding_strategy
        with strategy.launched(kwargs.get("trainer"), function, args):
            try:
                return super().launch(Guarded(function, strategy), *args, **kwargs)
            except BaseException:
                if self._children is not None:
                    self._children.has_failed = True
                raise

    def _call_children_scripts(self) -> None:
        before = connection_ids()
        # The variables that Lightning sets stay, because this process is a rank.
        with launching():
            self._open_port(self.cluster_environment)
            super()._call_children_scripts()
            environment = dict(os.environ)
        first_rank = self.cluster_environment.node_rank() * self.num_processes
        # Hidden from the observer of the base class, which kills all children when one fails, even while they save.
        processes, self.procs = self.procs, []
        directory = next((working_directory(process.pid) for process in processes), os.curdir)
        strategy = type(self.guarding_strategy)
        self._children = Children(processes, first_rank, environment, directory, before, strategy)
        atexit.register(self._children.wait_at_exit)

    def kill(self, signum: int) -> None:
        """Send `signum`; SIGKILL only to those that do not end by themselves."""
        deadline = time.monotonic() + (_CHILDREN_END_WITHIN_S if signum == signal.SIGKILL else 0)
        while any(child.poll() is None for child in self.children) and time.monotonic() < deadline:
            time.sleep(0.05)
        for child in self.children:
            child.send_signal(signum)  # does nothing to one that has ended
