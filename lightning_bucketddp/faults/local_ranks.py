"""The other ranks on this host, which may have died or be frozen, and asking the store where it may not answer."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from lightning_bucketddp.comm.connections import Connections
from lightning_bucketddp.faults.failure import Failure, Kind, describe_exit
from lightning_bucketddp.faults.side_channel import SideChannel, StoreSilentError
from lightning_bucketddp.processes import pid_namespace, process_state

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

# Linux 6.15 and later tell how a process ended, also to those that are not its parent (`PIDFD_GET_INFO`).
_GET_INFO = 0xC040FF0B
_INFO_SIZE = 64
_WITH_EXIT = 1 << 3
# How a process ended is known to its parent, or to all where the system tells: so long the others wait for who knows.
_STATUS_WITHIN_S = 0.7
# The store answers at once, unless its process is stopped.
_ANSWERS_WITHIN_S = 10.0


def place() -> str:
    """Return a name of this host and PID namespace, in which process numbers mean the same."""
    return f"{socket.gethostname()}/{pid_namespace()}"


def introduce(channel: SideChannel, *, pid: int, place: str) -> None:
    """Tell the ranks at `place` which process this rank is."""
    number = channel.add(f"num_at/{place}")
    channel.set(f"identity/{place}/{number}", {"rank": channel.rank, "pid": pid})
    channel.add("num_introduced")


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """Another rank's process on this host. The handle stays its own when the number is given to another process."""

    pid: int
    handle: int

    @property
    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def exit_status(self) -> int | None:
        """Return the exit status, negative for a signal; None if the system does not tell."""
        import fcntl  # not on every platform

        info = bytearray(struct.pack("QQ", _WITH_EXIT, 0).ljust(_INFO_SIZE, b"\0"))
        with suppress(OSError):
            fcntl.ioctl(self.handle, _GET_INFO, info)
            if struct.unpack_from("Q", info)[0] & _WITH_EXIT:
                return os.waitstatus_to_exitcode(struct.unpack_from("i", info, _INFO_SIZE - 4)[0])
        return None

    @property
    def is_frozen(self) -> bool:
        """Return whether it has been stopped (SIGSTOP, a debugger) and can do nothing by itself."""
        return process_state(self.pid) in ("T", "t") and not self.has_ended


class LocalRanks:
    """The processes of the other ranks on this host, found as they `introduce` themselves in the side channel."""

    def __init__(self, channel: SideChannel, *, exit_status_of: Callable[[int], int | None]) -> None:
        self._channel = channel
        self._exit_status_of = exit_status_of
        self.are_known = False  # all ranks have introduced themselves
        self._known: set[int] = set()
        self._processes: dict[int, LocalProcess] = {}
        self._ended_at: dict[int, float] = {}

    def discover(self) -> None:
        """Look for ranks on this host that have introduced themselves since the last call."""
        if self.are_known:
            return
        world_size = self._channel.world_size
        are_all_there = self._channel.add("num_introduced", 0) == world_size
        for number in range(1, min(self._channel.add(f"num_at/{place()}", 0), world_size) + 1):
            if number in self._known:
                continue
            if (introduced := self._channel.get(f"identity/{place()}/{number}", dict)) is None:
                continue  # not written yet
            self._known.add(number)
            rank, pid = introduced.get("rank"), introduced.get("pid")
            if type(rank) is int and type(pid) is int and rank not in (self._channel.rank, *self._processes):
                with suppress(OSError, OverflowError, AttributeError):  # it is gone, or the system has no handles
                    self._processes[rank] = LocalProcess(pid, os.pidfd_open(pid))
        self.are_known = are_all_there

    def find_death(self, *, has_left: Callable[[int, int | None], bool]) -> Failure | None:
        """Return the death of a rank on this host that was not through; `has_left` is asked by rank and exit status."""
        for rank, process in self._processes.items():
            if not process.has_ended:
                continue
            ended_at = self._ended_at.setdefault(rank, time.monotonic())
            status = process.exit_status
            status = self._exit_status_of(rank) if status is None else status
            if has_left(rank, status):
                continue
            if status is not None or time.monotonic() - ended_at > _STATUS_WITHIN_S:
                where = f"process {process.pid} on {socket.gethostname()}"
                return Failure(rank=rank, kind=Kind.DIED, what=describe_exit(status), process=where)
        return None

    def numbers(self) -> list[int]:
        return list(self._processes)

    def gone(self) -> list[int]:
        """Return the ranks whose processes have ended or are frozen: they learn nothing any more."""
        return [rank for rank, process in self._processes.items() if process.has_ended or process.is_frozen]

    def frozen(self) -> list[int]:
        return [rank for rank, process in self._processes.items() if process.is_frozen]

    def kill_frozen(self) -> None:
        """Kill the processes that cannot end by themselves."""
        for rank in self.frozen():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._processes[rank].handle, signal.SIGKILL)

    def close(self) -> None:
        for process in self._processes.values():
            os.close(process.handle)
        self._processes.clear()


class GuardedStore:
    """Asks the store only while it answers.

    `store_rank` is the rank whose process holds the store; None if no rank's does.
    """

    def __init__(
        self, channel: SideChannel, local_ranks: LocalRanks, connections: Connections, *, store_rank: int | None
    ) -> None:
        self.channel = channel
        self.local_ranks = local_ranks
        self.connections = connections
        self.is_lost = False  # the connection to the store is broken, for good
        self._store_rank = store_rank

        def is_silent() -> bool:
            connections.look()
            return self.is_silent

        channel.is_silent = is_silent

    @property
    def can_ask(self) -> bool:
        return not self.is_lost and not self.is_silent

    @property
    def is_silent(self) -> bool:
        """Return whether the store does not answer now: its process is frozen, or its host cannot be reached."""
        store_host = self.connections.store_host
        is_unreachable = store_host is not None and store_host in self.connections.silent_hosts
        return is_unreachable or self._store_rank in self.frozen_ranks()

    def frozen_ranks(self) -> list[int]:
        """Return the ranks that are known to be frozen: on this host, and the one whose store does not answer."""
        frozen = self.local_ranks.frozen()
        is_silent = self.channel.silent_for_s > self.channel.interval(_ANSWERS_WITHIN_S)
        if is_silent and self._store_rank is not None and self._store_rank not in (self.channel.rank, *frozen):
            frozen.append(self._store_rank)
        return frozen

    def ask(self, exchange: Callable[[], _Answer]) -> _Answer | None:
        """Return what `exchange` gets from the store; None if the store does not answer."""
        if self.can_ask:
            try:
                return exchange()
            except StoreSilentError:
                pass
            except RuntimeError as error:  # torch's network errors are no `OSError`s
                self.is_lost = True
                log.debug("bucketddp: rank %d has lost the store: %s", self.channel.rank, error)
        return None
