"""Signals that stop a run on all ranks, after the same step if they come to one.

Note: signals in a collective
    Python runs the handler of a signal in the main thread, between two of its instructions. While that thread waits for
    other ranks in gloo, or for a device, there are none: the handler runs when the collective has ended, which may be
    never. But Python writes the number of the signal to a descriptor as soon as it comes (`signal.set_wakeup_fd`), and
    another thread can read it there.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_bucketddp.comm.step_exchange import StepExchange
from lightning_bucketddp.faults.failure import RankFailedError
from lightning_bucketddp.faults.progress import Progress
from lightning_bucketddp.faults.watchdog import SAME_CTRL_C_WITHIN_S, Watchdog
from lightning_bucketddp.trainer_internals import replace_signal_handlers, slurm_requeue_of, stop_after_batch

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# A main thread that has not run a handler within this is not in Python.
_HANDLED_WITHIN_S = 1.0


class SignalWakeup:
    """Reports to another thread which signals this process has received (Note: signals in a collective).

    Only those that have a handler in Python: others end the process, or are ignored. A process has one descriptor,
    which all objects of this class share.
    """

    _installed: ClassVar[list[SignalWakeup]] = []
    _sockets: ClassVar[tuple[socket.socket, socket.socket] | None] = None
    _previous: ClassVar[int] = -1  # the descriptor of somebody else
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._numbers: deque[int] = deque()

    def install(self) -> None:
        """Begin to listen. Does nothing outside of the main thread: signals come only to that one."""
        if not is_main_thread():
            return
        cls = SignalWakeup
        if cls._sockets is None:
            reader, writer = socket.socketpair()
            reader.setblocking(False)
            writer.setblocking(False)
            cls._previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            cls._sockets = reader, writer
        cls._installed.append(self)

    def uninstall(self) -> None:
        cls = SignalWakeup
        cls._installed = [other for other in cls._installed if other is not self]
        # Only the main thread can give the descriptor back. Until then it stays open: its number must not become that
        # of another file.
        if cls._sockets is not None and not cls._installed and is_main_thread():
            reader, writer = cls._sockets
            current = signal.set_wakeup_fd(cls._previous, warn_on_full_buffer=False)
            if current not in (writer.fileno(), -1):
                signal.set_wakeup_fd(current, warn_on_full_buffer=False)  # somebody else has taken it meanwhile
            cls._sockets = None
            with cls._lock:
                reader.close()
                writer.close()

    def received(self) -> list[int]:
        """Return the numbers of the signals that came since the last call."""
        cls = SignalWakeup
        with cls._lock, suppress(OSError):  # there is nothing to read, or it is closed
            if cls._sockets is not None:
                numbers = cls._sockets[0].recv(4096)
                for wakeup in cls._installed:
                    wakeup._numbers.extend(numbers)
                if cls._previous != -1:
                    os.write(cls._previous, numbers)
        return [self._numbers.popleft() for _ in range(len(self._numbers))]

    @classmethod
    def leave_to_parent(cls) -> None:
        """Give the descriptor back in a forked child, such as a data worker: its signals are not its parent's."""
        if cls._sockets is not None:
            signal.set_wakeup_fd(cls._previous, warn_on_full_buffer=False)
        cls._installed, cls._sockets, cls._lock = [], None, threading.Lock()


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


os.register_at_fork(after_in_child=SignalWakeup.leave_to_parent)


class StopSignals:
    """Handles SIGTERM, SIGINT and SLURM's requeue signal of one run, so that all ranks stop after the same step.

    Others may wait in a collective for the rank whose handler runs: it must not raise, nor call a collective. So it
    only stores the signal, which goes to all ranks with the next synchronised backward. If there is none in time
    (validation, a very long step), the watchdog stops them where they are.
    """

    def __init__(self, trainer: Trainer, watchdog: Watchdog, progress: Progress, wakeup: SignalWakeup) -> None:
        self._trainer = trainer
        self._watchdog = watchdog
        self._progress = progress
        self._wakeup = wakeup
        # By signal: the handler that stops the run. The user may put another in its place.
        self._handlers: dict[int, Any] = {signal.SIGINT: signal.default_int_handler}
        self.exchange: StepExchange | None = None  # with whose messages signals travel
        self._requeue: Callable[..., Any] | None = None
        self._restore: Callable[[], None] = lambda: None
        self._callback: Any = None
        self._interrupted_at: float | None = None
        self._is_own = False  # the next SIGTERM is that of `interrupt`
        self.late_signal = 0  # that has come to a run which was ending anyway; 0: none
        self.requeue_signal = 0  # that has come, until all ranks have saved; 0: none

    def __deepcopy__(self, memo: dict[int, Any]) -> StopSignals:
        return self  # of a Trainer that is copied in a run, or of something that has it: there is one process

    def replace_handlers(self, callback: type) -> None:
        """Make Lightning register our handlers in place of its own.

        Args:
            callback: Lightning's base class of callbacks: only one of them can save within an epoch, where the state of
                the data is that of the step.
        """
        self._requeue = slurm_requeue_of(self._trainer)

        def on_registered() -> None:
            if not is_main_thread():
                return
            self._handlers[signal.SIGTERM] = signal.getsignal(signal.SIGTERM)
            # A shell has jobs in the background ignore it, and so shall we.
            if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
                # Last, so that Lightning puts back what was there before.
                signal.signal(signal.SIGINT, self._on_stop)
                self._handlers[signal.SIGINT] = self._on_stop

        # Also replaces the message of Lightning's loop in each step, which is a collective and a wait for the device.
        self._restore = replace_signal_handlers(
            self._trainer, on_sigterm=self._on_stop, on_requeue=self._on_requeue, on_registered=on_registered
        )
        self._callback = type("AfterBatch", (callback,), {"on_train_batch_end": self._after_batch})()
        self._trainer.callbacks.append(self._callback)  # type: ignore[attr-defined]

    def restore_handlers(self) -> None:
        self._restore()
        self._trainer.callbacks.remove(self._callback)  # type: ignore[attr-defined]

    def received(self) -> list[int]:
        """Return the signals that have come since the last call and shall stop the run; called by the watchdog."""
        return [n for n in self._wakeup.received() if n in self._handlers and signal.getsignal(n) == self._handlers[n]]

    @property
    def stop_signal(self) -> int:
        """The signal that has come to some rank, as far as this one knows; 0: none."""
        return self._watchdog.stop_signal

    def stop_if_agreed(self) -> None:
        """Stop, if a signal has come to some rank: all ranks have read the same messages."""
        if self.exchange is not None and self.exchange.all_stop_by:
            self._watchdog.request_stop(self.exchange.all_stop_by)
            # All of them: Lightning raises at the end of this batch.
            stop_after_batch(self._trainer)

    def _after_batch(self, *_: object) -> None:
        """Save and requeue, if that was asked for: all ranks are between two steps."""
        if self.exchange is not None and self.exchange.all_requeue:
            self.exchange.all_requeue = self.exchange.wants_requeue = False
            assert self._requeue is not None
            self._requeue(signal.SIGUSR1, None)
            self.requeue_signal = 0

    def interrupt(self) -> None:
        """Make the training thread raise; called by the watchdog."""
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            self._is_own = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _on_stop(self, number: int, _frame: object) -> None:
        is_own = number == signal.SIGTERM and self._is_own
        self._is_own = self._is_own and not is_own
        is_ending, end_with = self._watchdog.is_ending, self._progress.end_with
        if not is_own and (is_ending or end_with is not None):
            self.late_signal = number
            # A second signal must not spoil the last checkpoint, nor the way to it, of which the watchdog knows later.
            is_ending = is_ending or isinstance(sys.exc_info()[1], RankFailedError)
        if not is_ending and end_with is not None and self._progress.may_be_interrupted:
            raise end_with()
        if is_ending or end_with is not None:
            return
        # Checked here: another rank may have reported the same Ctrl-C before this one has noticed it.
        if number == signal.SIGINT:
            if self._interrupted_at is not None:
                if time.monotonic() - self._interrupted_at > SAME_CTRL_C_WITHIN_S:
                    raise KeyboardInterrupt  # pressed twice: at once
                return
            self._interrupted_at = time.monotonic()
        self._watchdog.receive_signal(number)
        if self.exchange is not None:
            self.exchange.stop_signal = number

    def _on_requeue(self, number: int, frame: object) -> None:
        if self.exchange is not None:
            self.requeue_signal = number
            self.exchange.wants_requeue = True  # after the next step, also in a validation
        elif self._requeue is not None:
            self._requeue(number, frame)  # nothing is being trained


class InterruptSignals:
    """Handles SIGINT in a program with a loop of its own: Python raises `KeyboardInterrupt` for the user to handle.

    Python cannot raise while the main thread is in C++. Then the run is stopped on all ranks.
    """

    def __init__(self, wakeup: SignalWakeup) -> None:
        self._wakeup = wakeup
        self._came_at: float | None = None  # None: the handler has run since
        self._checked_at = self._handled_at = 0.0

    def replace_handlers(self) -> None:
        """Notice when Python has raised; a handler that the user has installed stays as it is."""
        if is_main_thread() and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_interrupt)

    def restore_handlers(self) -> None:
        if is_main_thread() and self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def received(self) -> list[int]:
        """Return SIGINT if it has come and Python has not raised; called by the watchdog."""
        checked_at, self._checked_at = self._checked_at, time.monotonic()
        has_come = signal.SIGINT in self._wakeup.received() and self._is_installed
        if has_come and self._handled_at < checked_at:
            self._came_at = self._checked_at
        if self._came_at is None or self._checked_at - self._came_at < _HANDLED_WITHIN_S:
            return []
        self._came_at = None
        return [signal.SIGINT]

    def interrupt(self) -> None:
        """Make the training thread raise; called by the watchdog."""
        if self._is_installed:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    @property
    def _is_installed(self) -> bool:
        return signal.getsignal(signal.SIGINT) == self._on_interrupt

    def _on_interrupt(self, number: int, frame: Any) -> None:
        self._handled_at, self._came_at = time.monotonic(), None
        signal.default_int_handler(number, frame)
