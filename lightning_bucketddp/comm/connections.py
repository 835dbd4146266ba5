"""The TCP connections between the ranks.

Note: cutting the lines
    A rank that waits in a collective of gloo for another that has left waits until the time-out: nothing in torch ends
    it. But it ends at once when the connection does. One end of each connection between two ranks was accepted by a
    port on which that rank listens. So when each rank shuts down what was accepted by its own ports, the store's
    excepted, every connection is cut, whoever made it: our groups, the user's, those of a metric.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

_DESCRIPTORS = "/proc/self/fd"


def cut_connections(*, except_port: int | None) -> int:
    """Shut down what this process's own ports, but for `except_port`, have accepted; how many (Note: cutting)."""
    sockets = list(_tcp_sockets())
    try:
        ports = {s.getsockname()[1] for s in sockets if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}
        ports.discard(except_port)
        accepted = [s for s in sockets if s.getsockname()[1] in ports and _is_connected(s)]
        for s in accepted:
            with suppress(OSError):  # the other end may be gone already
                s.shutdown(socket.SHUT_RDWR)
        return len(accepted)
    finally:
        for s in sockets:
            s.close()


def _tcp_sockets() -> Iterator[socket.socket]:
    """Each socket under a descriptor of its own, to be closed by the caller."""
    for name in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                s = socket.socket(fileno=os.dup(int(name)))
                if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                    yield s
                else:
                    s.close()


def _is_connected(s: socket.socket) -> bool:
    try:
        s.getpeername()
    except OSError:
        return False
    return True
