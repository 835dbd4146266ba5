"""Ports for programs that take a number and listen later.

A port that the kernel has given and taken back may be somebody else's by then: it gives the same numbers to all who ask
for any, and to every connection that is made. Ours are below those, and reserved among all who ask here.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_LOWEST = 10_000
# Of this process, to its end: names of sockets in no file system, which only one process of a host can have.
_reserved: list[socket.socket] = []


def own_port() -> int:
    """Return a port at which nobody listens, and that no other caller on this host gets while this process runs."""
    lowest_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(_LOWEST, max(lowest_of_kernel, 2 * _LOWEST))
        reservation = socket.socket(socket.AF_UNIX)
        with suppress(OSError):  # somebody has it
            reservation.bind(f"\0bucketddp-port-{port}")
            with socket.create_server(("", port)):
                _reserved.append(reservation)
                return port
        reservation.close()
