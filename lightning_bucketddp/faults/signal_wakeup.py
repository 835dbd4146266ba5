"""Noticing signals at once, also while the main thread waits in C++.

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
import threading
from collections import deque
from contextlib import suppress


class SignalWakeup:
    """Tells another thread which signals this process has received (Note: signals in a collective).

    Only those that have a handler in Python: others end the process, or are ignored.
    """

    def __init__(self) -> None:
        self._numbers: deque[int] = deque()

    def install(self) -> None:
        """Begin to listen. Does nothing outside of the main thread: signals come only to that one."""
        if _is_main_thread():
            _DESCRIPTOR.add(self._numbers)

    def uninstall(self) -> None:
        """Stop listening."""
        _DESCRIPTOR.remove(self._numbers)

    def received(self) -> list[int]:
        """Return the numbers of the signals that came since the last call."""
        _DESCRIPTOR.read()
        return [self._numbers.popleft() for _ in range(len(self._numbers))]


class _WakeupDescriptor:
    """The descriptor, of which a process has one, and all who listen to it."""

    def __init__(self) -> None:
        self._listeners: list[deque[int]] = []
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._previous = -1
        self._lock = threading.Lock()

    def add(self, listener: deque[int]) -> None:
        if self._sockets is None:
            reader, writer = socket.socketpair()
            reader.setblocking(False)
            writer.setblocking(False)
            self._previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            self._sockets = reader, writer
        self._listeners.append(listener)

    def remove(self, listener: deque[int]) -> None:
        self._listeners = [other for other in self._listeners if other is not listener]
        # Only the main thread can give the descriptor back. Until then it stays open: its number must not become that
        # of another file.
        if self._sockets is not None and not self._listeners and _is_main_thread():
            reader, writer = self._sockets
            theirs = signal.set_wakeup_fd(self._previous, warn_on_full_buffer=False)
            if theirs not in (writer.fileno(), -1):
                signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)  # somebody else has taken it meanwhile
            self._sockets = None
            with self._lock:
                reader.close()
                writer.close()

    def read(self) -> None:
        with self._lock, suppress(OSError):  # there is nothing to read, or it is closed
            if self._sockets is None:
                return
            numbers = self._sockets[0].recv(4096)
            for listener in self._listeners:
                listener.extend(numbers)
            if self._previous != -1:
                os.write(self._previous, numbers)

    def leave_to_parent(self) -> None:
        """In a forked child (a data worker, say) give the descriptor back: its signals are none of its parent's."""
        if self._sockets is not None:
            signal.set_wakeup_fd(self._previous, warn_on_full_buffer=False)
        self._listeners, self._sockets, self._lock = [], None, threading.Lock()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_DESCRIPTOR = _WakeupDescriptor()
os.register_at_fork(after_in_child=_DESCRIPTOR.leave_to_parent)
