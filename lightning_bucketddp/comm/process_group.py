"""The process group as a whole: its store, its NCCL backend, collectives that are not ours, and leaving it."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_bucketddp.processes import agent_holds_store, variables_by_default


@dataclass(frozen=True)
class StoreAccess:
    """The store of the process group, over a connection of its own."""

    store: Any
    host: str | None  # None if it is not on a network
    port: int | None
    # Of the process group, and of no other that a store has seen: torchrun's is there from one restart to the next, and
    # agents on several hosts count restarts differently.
    name: str
    is_held_by_rank_zero: bool  # otherwise by torchrun's agent

    @property
    def is_there(self) -> bool:
        if self.host is None or self.port is None:
            return True
        try:
            socket.create_connection((self.host, self.port), timeout=1).close()
        except OSError:
            return False
        return True


def access_store() -> StoreAccess:
    """Connect once more to the store that the process group was made with."""
    store: Any = dist.distributed_c10d._get_default_store()
    underlying = store
    while hasattr(underlying, "underlying_store"):
        underlying = underlying.underlying_store
    host: Any = getattr(underlying, "host", None)
    port: Any = getattr(underlying, "port", None)
    if hasattr(store, "clone"):
        connection = store.clone()
    else:  # torch 2.5 cannot
        connection = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    group_name = dist.group.WORLD.group_name if dist.group.WORLD is not None else ""
    identity = store.compare_set(f"bucketddp/identity/{group_name}", "", uuid.uuid4().hex).decode()
    return StoreAccess(connection, host, port, f"{group_name}/{identity}", is_held_by_rank_zero=not agent_holds_store())


def tried_nccl() -> AbstractContextManager[None]:
    """Have `nccl` mean ProcessGroupNCCL in torch 2.15 and later, too, if it is first used in the block.

    There the name stands for another backend, which nobody has tried with us (docs/compatibility.md). torch reads the
    variable when the name is first used in a process, and keeps to it; one that the user has set stays.
    """
    return variables_by_default({"TORCH_DIST_USE_NCCL2": "0"})


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


class ForeignCollectives:
    """Counts what others launch in `group`, by its sequence number, which advances with each collective.

    `num_seen` are those up to the last call of anything here. Only differences mean something: what was launched before
    the first call is counted, ours or not. If `group` is None, there is nothing to count.
    """

    def __init__(self, group: Any) -> None:
        self.num_seen = 0
        self._group = group
        self._counted_up_to = 0

    def count(self) -> int:
        launched = self._num_launched()
        self.num_seen += launched - self._counted_up_to
        self._counted_up_to = launched
        return self.num_seen

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave out what is launched inside: it is ours. Not to be nested."""
        self.count()
        try:
            yield
        finally:
            self._counted_up_to = self._num_launched()

    def _num_launched(self) -> int:
        if self._group is None:
            return 0
        try:
            return int(self._group._get_sequence_number_for_group())
        except RuntimeError:  # a backend that does not count
            self._group = None
            return self._counted_up_to
