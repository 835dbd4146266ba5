"""The other ranks on this host: which have died, and which are frozen."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lightning_bucketddp.faults.failure import Failure, Kind, describe_exit
from lightning_bucketddp.faults.side_channel import SideChannel

# Linux 6.15 and later tell how a process ended, also to who is not its parent (`PIDFD_GET_INFO`).
_GET_INFO = 0xC040FF0B
_INFO_SIZE = 64
_WITH_EXIT = 1 << 3


def identity() -> dict[str, Any]:
    """What other ranks need to know of this process. Process numbers mean something in one namespace only."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return {"host": socket.gethostname(), "namespace": namespace, "pid": os.getpid()}


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """Another rank's process on this host. The handle stays its own when the number is given to another process."""

    host: str
    pid: int
    handle: int

    @classmethod
    def find(cls, described: dict[str, Any]) -> LocalProcess | None:
        """The process of `identity()`, if it is on this host and the system can watch processes."""
        here = identity()
        if any(described[key] != here[key] for key in ("host", "namespace")):
            return None
        with suppress(OSError, AttributeError):
            return cls(described["host"], described["pid"], os.pidfd_open(described["pid"]))
        return None

    @property
    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def exit_status(self) -> int | None:
        """Negative for a signal; None if the system does not say."""
        import fcntl  # not on every platform

        info = bytearray(struct.pack("QQ", _WITH_EXIT, 0).ljust(_INFO_SIZE, b"\0"))
        with suppress(OSError):
            fcntl.ioctl(self.handle, _GET_INFO, info)
            if struct.unpack_from("Q", info)[0] & _WITH_EXIT:
                return os.waitstatus_to_exitcode(struct.unpack_from("i", info, _INFO_SIZE - 4)[0])
        return None

    @property
    def is_frozen(self) -> bool:
        """Whether it has been stopped (SIGSTOP, a debugger) and can do nothing by itself."""
        with suppress(OSError), open(f"/proc/{self.pid}/stat") as file:
            return not self.has_ended and file.read().rpartition(")")[2].split()[0] in ("T", "t")
        return False

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.handle)


# How a process ended is known to its parent, or to all where the system tells: so long the others wait for who knows.
_STATUS_WITHIN_S = 0.7


class LocalRanks:
    """The processes of the ranks on this host, found as they introduce themselves.

    Args:
        channel: where they do.
        exit_status_of: how the process of a rank ended, if this process has started it.
    """

    def __init__(self, channel: SideChannel, *, exit_status_of: Callable[[int], int | None]) -> None:
        self._channel = channel
        self._exit_status_of = exit_status_of
        self._unmet = {rank for rank in range(channel.world_size) if rank != channel.rank}
        self._processes: dict[int, LocalProcess] = {}
        self._ended_at: dict[int, float] = {}

    def meet(self) -> None:
        """Look for ranks that have introduced themselves since."""
        for rank in sorted(self._unmet):
            if (described := self._channel.identity_of(rank)) is not None:
                self._unmet.discard(rank)
                if (peer := LocalProcess.find(described)) is not None:
                    self._processes[rank] = peer

    @property
    def are_met(self) -> bool:
        """Whether all ranks have introduced themselves."""
        return not self._unmet

    def death(self, *, has_left: Callable[[int, int | None], bool]) -> Failure | None:
        """The death of a neighbour that had not left before; `has_left` is asked with its rank and exit status."""
        for rank, peer in self._processes.items():
            if not peer.has_ended:
                continue
            ended_at = self._ended_at.setdefault(rank, time.monotonic())
            status = peer.exit_status
            status = self._exit_status_of(rank) if status is None else status
            if has_left(rank, status):
                continue
            if status is not None or time.monotonic() - ended_at > _STATUS_WITHIN_S:
                process = f"process {peer.pid} on {peer.host}"
                return Failure(rank=rank, kind=Kind.DIED, what=describe_exit(status), process=process)
        return None

    def gone(self) -> list[int]:
        """Return the ranks whose processes have ended or are stopped: they learn nothing any more."""
        return [rank for rank, peer in self._processes.items() if peer.has_ended or peer.is_frozen]

    def frozen(self) -> list[int]:
        """The ranks whose processes are stopped."""
        return [rank for rank, peer in self._processes.items() if peer.is_frozen]

    def kill_frozen(self) -> None:
        """End those that can no longer end by themselves."""
        for rank in self.frozen():
            self._processes[rank].kill()

    def close(self) -> None:
        for peer in self._processes.values():
            peer.close()
        self._processes.clear()
