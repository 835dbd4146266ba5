"""The process group as a whole: its store, its NCCL backend, collectives of users, roll calls, leaving it."""

from __future__ import annotations

import atexit
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

# Keeps a process alive after a failure in a group that is made with these: torch would end it a minute later.
SURVIVING_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
# Makes `nccl` mean ProcessGroupNCCL in torch 2.15 and later, too. There the name stands for another backend, with which
# the strategy is untested (docs/compatibility.md). torch reads the variable once in a process, when it first uses NCCL.
TRIED_NCCL = {"TORCH_DIST_USE_NCCL2": "0"}
_ABORTED_WITHIN_S = 5.0
_LEFT_BEHIND: list[Any] = []  # groups that were aborted


@dataclass(frozen=True)
class StoreAccess:
    """The store of the process group, over a connection of its own."""

    store: Any
    host: str | None  # None if it is not on a network
    port: int | None
    # Unique among all process groups of a store: torchrun's store outlives restarts, and agents on several hosts count
    # restarts differently.
    name: str

    @property
    def is_there(self) -> bool:
        with suppress(OSError):
            if self.host is not None and self.port is not None:
                socket.create_connection((self.host, self.port), timeout=1).close()
            return True
        return False


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
    return StoreAccess(connection, host, port, f"{group_name}/{identity}")


def _device_groups() -> list[Any]:
    return [group for group in dist.distributed_c10d._world.pg_map if "nccl" in dist.get_backend(group)]


def abort_device_groups(release_graphs: Callable[[], None] = lambda: None) -> None:
    """Abort the collectives on a device, in every group of this process. Those of gloo end when connections are cut.

    NCCL waits for the end of all CUDA graphs that have its kernels, so `release_graphs` drops them at the same time: a
    graph that is being replayed ends when its kernels are aborted. The program may have graphs of its own: what has not
    ended after a while is left to the end of the process.
    """

    def abort() -> None:
        for group in groups:
            group.abort()

    if groups := _device_groups():
        threads = [threading.Thread(target=it, name="bucketddp-abort", daemon=True) for it in (abort, release_graphs)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _ABORTED_WITHIN_S
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))


def leave_process_group() -> None:
    """Take this process out of its process group, without waiting for ranks that are gone."""
    if dist.is_initialized():
        # Destroying one of these waits for NCCL's watchdog, which waits for ranks that are gone.
        for group in _device_groups():
            _LEFT_BEHIND.append(group)
            del dist.distributed_c10d._world.pg_names[group]  # those that are shut down
        dist.destroy_process_group()


@dataclass(slots=True)
class ForeignCollectives:
    """Counts collectives of the user in `group`, by its sequence number, which advances with each collective.

    `num_seen` is the count at the last call. Only differences have a meaning: what was launched before the first call
    is counted, ours or not. If `group` is None, there is nothing to count.
    """

    group: Any
    num_seen: int = 0
    _counted_up_to: int = 0

    def count(self) -> int:
        launched = self._num_launched()
        self.num_seen += launched - self._counted_up_to
        self._counted_up_to = launched
        return self.num_seen

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Do not count what is launched in the block. Not to be nested."""
        self.count()
        try:
            yield
        finally:
            self._counted_up_to = self._num_launched()

    def _num_launched(self) -> int:
        if self.group is None:
            return 0
        try:
            return int(self.group._get_sequence_number_for_group())
        except RuntimeError:  # a backend that does not count
            self.group = None
            return self._counted_up_to


_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.2
# Thousands of ranks ask the store less often, so that together they ask no more than it can answer.
ASKS_EVERY_S_PER_RANK = 0.0005


class RollCall:
    """Waits for all ranks outside of collectives.

    A rank that does not answer may be in any other collective. Two ranks in different collectives of a group take each
    other's messages for their own, which ends a process of gloo.
    """

    def __init__(self, *, rank: int, world_size: int, timeout_s: float) -> None:
        self.number = 0
        self.broken_by: RuntimeError | None = None  # the store's error, if that is gone
        self._access = access_store()
        self._store = self._access.store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._run = f"bucketddp/{self._access.name}"
        self._name = f"{self._run}/roll_calls/{self._store.add(f'{self._run}/num_roll_calls/{rank}', 1)}"
        # This rank answers no more when the object is gone, and when the program ends: before a process that has
        # started others waits for their end.
        leave = weakref.finalize(self, partial(_leave, self._access, f"{self._name}/left/{rank}"))
        leave.atexit = False
        atexit.register(leave)

    def absent(self, *, waiting_elsewhere: Callable[[], Sequence[int]], raise_if_over: Callable[[], None]) -> list[int]:
        """Wait until all ranks answer, and return none; or return ranks that do not, as soon as that is known."""
        self.number += 1
        key = f"{self._name}/{self.number}"
        num_answers = self._add(key, 1)
        pause_s = _FIRST_PAUSE_S
        deadline = time.monotonic() + self._timeout_s
        while num_answers != self._world_size:
            raise_if_over()
            if num_answers is None:
                return [0]  # it held the store
            if pause_s >= _LONGEST_PAUSE_S and (absent := [*self._gone(), *waiting_elsewhere()]):
                return absent
            if time.monotonic() > deadline:
                raise RuntimeError(f"Rank {self._rank} timed out: it has waited {self._timeout_s:g} s for all ranks.")
            time.sleep(max(pause_s, ASKS_EVERY_S_PER_RANK * self._world_size))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            num_answers = self._add(key, 0)
        return []

    def _add(self, key: str, number: int) -> int | None:
        """Add `number` in the store, and return the sum; None: the store is gone."""
        try:
            return int(self._store.add(key, number))
        except RuntimeError as error:
            if self._access.is_there:
                raise
            self.broken_by = error
            return None

    def _gone(self) -> list[int]:
        """Return ranks that have ended, or begun another run. Only rank zero asks for all; others ask for it."""

        def num_runs(rank: int) -> int:
            return int(self._store.add(f"{self._run}/num_runs/{rank}", 0))

        others = range(1, self._world_size) if self._rank == 0 else [0]
        own = num_runs(self._rank)
        return [rank for rank in others if self._store.check([f"{self._name}/left/{rank}"]) or num_runs(rank) > own]


def _leave(access: StoreAccess, key: str) -> None:
    # torch logs pages about a store that is gone.
    if access.is_there:
        with suppress(RuntimeError):
            access.store.set(key, "")
