"""How a run ends on all ranks when one of them fails, dies, is stuck or is asked to stop.

Note: partial step
    On a GPU the host is ahead of the device: when a rank dies, another may have queued the exchange of gradients and
    the optimizer's step after it. Ending the exchange lets that step run, with partial gradients. The weights on the
    device must not be saved then. Where hosts exchange gradients, the host waits for them, and raises.
"""

from __future__ import annotations

import atexit
import faulthandler
import math
import os
import signal
import sys
import weakref
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch.distributed.constants import default_pg_timeout

from lightning_bucketddp.checkpoint.atomic_file import claim_file
from lightning_bucketddp.comm.connections import Connections, cut_connections
from lightning_bucketddp.comm.process_group import abort_device_groups, access_store, leave_process_group
from lightning_bucketddp.faults.failure import Kind, show_error
from lightning_bucketddp.faults.heartbeat import HeartbeatMonitor
from lightning_bucketddp.faults.side_channel import SideChannel
from lightning_bucketddp.faults.signals import InterruptSignals, SignalWakeup, StopSignals
from lightning_bucketddp.faults.watchdog import Watchdog, WatchdogActions
from lightning_bucketddp.processes import agent_holds_store, is_launched_by_torchrun

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_bucketddp.strategies.base import StrategyBase


# How long libraries may take to end after Python has. NCCL may wait for a rank that is gone.
_LIBRARIES_END_WITHIN_S = 3.0


class FaultHandler:
    """Watches one run of `strategy` and ends it, from the moment that there is a process group."""

    def __init__(self, strategy: StrategyBase) -> None:
        self.signals: StopSignals | None = None
        self._handlers: list[StopSignals | InterruptSignals] = []
        self._undo = ExitStack()
        self._wakeup = SignalWakeup()
        self._rank = rank = strategy.global_rank
        self._progress = strategy._progress
        self._is_over = False
        # Whether this rank saves for all (Note: one saver); None: the ranks have not aborted, so that rank zero does.
        self.is_saver: bool | None = None
        self._strategy = weakref.ref(strategy)  # the watchdog must not keep the strategy alive
        self._access = access_store()
        self._launched_as = range(strategy.world_size) if strategy.members is None else strategy.members
        self._first_rank = self._launched_as[rank] - strategy.local_rank
        timeouts = strategy.options.timeouts
        monitor = HeartbeatMonitor(
            self._new_channel(strategy.world_size),
            self._progress,
            warn_after_s=timeouts.stall_warning_s,
            timeout_s=(strategy.options.timeout or default_pg_timeout).total_seconds(),
            stall_timeout_s=timeouts.stall_s or math.inf,
        )
        # Then the parent process has started the ranks without being one of them, and outlives them.
        has_launcher = strategy.options.start_method != "popen" or is_launched_by_torchrun()
        actions = WatchdogActions(
            cut=self._cut,
            interrupt=self._interrupt,
            signals_received=lambda: [number for handler in self._handlers for number in handler.received()],
            exit_status_of=self._exit_status_of,
            launcher_pid=os.getppid() if has_launcher else None,
            claim_file=self._claim_file,
        )
        self.watchdog = Watchdog(monitor, actions)

    def _new_channel(self, world_size: int) -> SideChannel:
        access = self._access
        # Runs follow each other in one process group; each rank counts its runs.
        run = f"bucketddp/{access.name}"
        return SideChannel(
            access.store,
            name=f"{run}/{access.store.add(f'{run}/num_runs/{self._rank}', 1)}",
            rank=self._rank,
            world_size=world_size,
            connections=Connections(access.port),
            store_rank=None if agent_holds_store() else 0,
        )

    def _cut(self) -> None:
        cut_connections(except_port=self._access.port)
        if (strategy := self._strategy()) is None:
            abort_device_groups()
        else:
            strategy.note_partial_step()
            abort_device_groups(strategy.release_graphs)

    def _interrupt(self) -> None:
        for handler in self._handlers:
            handler.interrupt()

    def _claim_file(self, run_id: str) -> bool:
        directory = None if (strategy := self._strategy()) is None else strategy.directory_to_save_in()
        return directory is None or claim_file(directory, run_id)

    def _exit_status_of(self, rank: int) -> int | None:
        launcher = None if (strategy := self._strategy()) is None else strategy._launcher
        # By local rank, from 1 on: this process has started them, and is local rank 0.
        children, local_rank = getattr(launcher, "children", ()), self._launched_as[rank] - self._first_rank
        return children[local_rank - 1].poll() if 0 < local_rank <= len(children) else None

    def begin(self) -> None:
        self._wakeup.install()
        self._undo.callback(self._wakeup.uninstall)
        self.watchdog.start()
        # A thread that uses the store while Python shuts down would crash the process. What is registered early runs
        # late.
        atexit.register(self._end_with_python)

    def await_others(self) -> int:
        """Wait a little until the run is over on all ranks, so that they begin the next one in the same process group.

        Return the signal that has come to some rank, or 0.
        """
        self.watchdog.await_others()
        if self.watchdog.shutdown.has_aborted:
            leave_process_group()
        return self.watchdog.stop_signal

    def end(self) -> None:
        """Stop watching: the run is over on this rank, well or not."""
        self._undo.close()
        self._is_over = True
        self.watchdog.stop()
        if not self.watchdog.shutdown.has_aborted:
            self.forget_at_exit()

    def forget_at_exit(self) -> None:
        """Let the process end in its own time after this aborted run: another run follows."""
        atexit.unregister(self._end_with_python)

    def _end_with_python(self) -> None:
        self.watchdog.stop()
        # If there is a process group, another run has followed.
        if self.watchdog.shutdown.has_aborted and not torch.distributed.is_initialized():
            nowhere = open(os.devnull, "w")  # noqa: SIM115  (stays open to the end)
            faulthandler.dump_traceback_later(_LIBRARIES_END_WITHIN_S, exit=True, file=nowhere)

    def handle_signals(self, trainer: Trainer, *, callback: type) -> None:
        """Have signals stop all ranks; `callback` is Lightning's base class of callbacks."""
        self.signals = StopSignals(trainer, self.watchdog, self._progress, self._wakeup)
        self.signals.replace_handlers(callback)
        self._add(self.signals)

    def _add(self, handlers: StopSignals | InterruptSignals) -> None:
        self._handlers.append(handlers)
        self._undo.callback(handlers.restore_handlers)

    def handle_end_of_program(self) -> None:
        """Have Ctrl-C and an exception that ends the program end the run, where the user's program has the loop."""
        interrupts = InterruptSignals(self._wakeup)
        interrupts.replace_handlers()
        self._add(interrupts)
        # A weak reference, because later hooks may keep this one for good.
        this, previous = weakref.ref(self), sys.excepthook

        def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
            handler = this()
            instead = None if handler is None or handler._is_over else handler.end_by(error)
            show_error(previous, instead or error)

        def restore() -> None:
            if sys.excepthook is report:
                sys.excepthook = previous

        sys.excepthook = report
        self._undo.callback(restore)

    def end_by(
        self, error: BaseException, *, sigterm_exception: type[SystemExit] | None = None
    ) -> BaseException | None:
        """Notify all ranks that this one ends by `error`; return the error to raise instead, if another rank was first.

        `sigterm_exception` is raised where SIGTERM stops a run; None: `SystemExit`.
        """
        is_sigterm = sigterm_exception is not None and isinstance(error, sigterm_exception)
        stopped_by = 0
        if isinstance(error, KeyboardInterrupt) or is_sigterm:
            stopped_by = self.watchdog.stop_signal or signal.SIGINT
        failure = self.watchdog.end_by(error, stopped_by=stopped_by)
        if self.watchdog.shutdown.has_aborted:
            # From now on, metrics and the user's code find a run without other ranks.
            leave_process_group()
            self.is_saver = self.watchdog.saver.is_won(failure)
        if failure.kind is Kind.STOPPED:
            if failure.signal == signal.SIGINT:
                return None if isinstance(error, KeyboardInterrupt) else KeyboardInterrupt()
            # As a shell reports a process that a signal has ended. Lightning's exception would end with 0.
            return (sigterm_exception or SystemExit)(128 + failure.signal)
        # If the others have given this rank up, its error is only a connection that they have ended.
        is_given_up = failure.kind is Kind.LOST or (
            failure.kind is Kind.STALLED and self._progress.was_waiting(error) and not failure.is_of(error)
        )
        # Where all ranks have raised, each keeps its own error.
        is_own = (failure.rank == self._rank and not is_given_up) or not self.watchdog.shutdown.has_aborted
        return None if is_own else failure.error_for(self._rank)


def explain_unsaved(
    strategy: StrategyBase, path: object, *, with_optimizers: bool, newest: object = None
) -> str | None:
    """Return why there is no checkpoint at `path`; None: it can be saved. `newest` is the last one, if it is known."""
    before = "the checkpoint before" if newest is None else f"`{newest}`, the last that was saved"
    if strategy.has_partial_weights:  # (Note: partial step)
        return (
            f"checkpoint `{path}` is not saved, because a rank was lost while gradients or weights were being"
            f" exchanged, and the weights on this rank may be wrong. Resume from {before}."
        )
    if strategy.has_lost_shards and with_optimizers:
        return (
            f"`{path}` is not saved: the other ranks cannot be reached any more, and each of them has a part of the"
            f" optimizers' state (`shard_optimizer`). Resume from {before}."
        )
    return None
