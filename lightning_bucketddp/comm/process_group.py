"""The process group as a whole: its store, its connections, and leaving it.

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
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_bucketddp.processes import agent_holds_store

_DESCRIPTORS = "/proc/self/fd"


@dataclass(frozen=True)
class StoreAccess:
    """The store of the process group, over a connection of its own.

    Attributes:
        store: the connection.
        port: where the store listens; None if it is not on a network.
        name: of the process group; groups that share a store have different names.
        is_held_by_rank_zero: otherwise torchrun's agent holds it.
    """

    store: Any
    port: int | None
    name: str
    is_held_by_rank_zero: bool


def access_store() -> StoreAccess:
    """Connect once more to the store that the process group was made with."""
    store: Any = dist.distributed_c10d._get_default_store()
    underlying = store
    while hasattr(underlying, "underlying_store"):
        underlying = underlying.underlying_store
    if hasattr(store, "clone"):
        connection = store.clone()
    else:  # torch 2.5 cannot
        address = (underlying.host, underlying.port)
        connection = dist.TCPStore(*address, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    return StoreAccess(
        connection,
        port=getattr(underlying, "port", None),
        name=dist.group.WORLD.group_name if dist.group.WORLD is not None else "",
        is_held_by_rank_zero=not agent_holds_store(),
    )


def abort_device_groups() -> None:
    """Abort the collectives on a device, in every group of this process. Those of gloo end when connections are cut."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if "nccl" in dist.get_backend(group):
            group.abort()


def leave_process_group() -> None:
    """Take this process out of its process group, without waiting for ranks that are gone."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        # Destroying the group would wait for NCCL's watchdog, and that for ranks that are gone.
        dist.distributed_c10d._update_default_pg(None)
    elif dist.is_initialized():
        dist.destroy_process_group()


def cut_connections(*, except_port: int | None) -> int:
    """Shut down the connections that this process has accepted, but at `except_port` (Note: cutting the lines).

    Returns how many they were.
    """
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
    """Yield each TCP socket of this process under a new descriptor, which the caller closes."""
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
