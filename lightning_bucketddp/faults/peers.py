"""The other ranks' processes, as far as they run on this host."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

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
class Peer:
    """Another rank's process on this host. The handle stays its own when the number is given to another process."""

    host: str
    pid: int
    handle: int

    @classmethod
    def find(cls, described: dict[str, Any]) -> Peer | None:
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
