"""Something that all ranks try together, and that ends for all of them when it fails on one.

When one rank runs out of memory, the others wait for it in some collective. In a trial the ranks therefore ask each
other before each collective of all ranks, over connections of their own, whether all are well. A rank that has failed
comes to the next question instead of to the collective, and all ranks raise. Every collective was either begun by all
of them or by none, so process groups stay as they were.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.processes import WorkerThread

# Methods of `ProcessGroup`: whatever calls a collective in Python comes to one of them. Not all are in each version.
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter", "barrier", "monitored_barrier"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "alltoall", "alltoall_base"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
)


class Status(IntEnum):
    """How a rank does in a trial, the worst last."""

    RUNNING = 0
    DONE = 1
    OUT_OF_MEMORY = 2
    FAILED = 3


class Trials:
    """Trials that succeed on all ranks or on none, one after the other.

    Args:
        is_out_of_memory: whether an error says that memory was not enough, as what is raised on the other ranks does.
    """

    def __init__(self, collectives: Collectives, *, is_out_of_memory: Callable[[BaseException], bool]) -> None:
        self._ranks = collectives.further_group("agreement", in_host_memory=True)
        self._is_out_of_memory = is_out_of_memory
        self._outcome: Status | None = None  # of all ranks, once the trial is over
        self._rank = 0  # which has decided it

    def ran_out_of_memory(self, error: BaseException | None) -> bool:
        """Return whether `error`, or one in whose handling it was raised, says that memory was not enough."""
        while error is not None:
            if self._is_out_of_memory(error):
                return True
            error = error.__cause__ or error.__context__
        return False

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Try what is inside. All ranks must do so; it raises on all of them if it does on one."""
        self._outcome, error = None, None
        try:
            with _before_each_collective(self._go_on):
                yield
        except Exception as raised:
            error = raised
        own = Status.DONE
        if error is not None:
            own = Status.OUT_OF_MEMORY if self.ran_out_of_memory(error) else Status.FAILED
        while self._outcome is None:
            self._ask(own)
        try:
            # Each rank knows best what it has raised, unless that only hides a lack of memory.
            if error is not None and self._outcome is own and (own is Status.FAILED or self._is_out_of_memory(error)):
                raise error
            self._raise_if_over()
        finally:
            del error  # it holds this frame, and all that the trial has left

    def _go_on(self, group: Any) -> None:
        if group is self._ranks.group or group.size() != self._ranks.world_size:
            return
        self._raise_if_over()
        # What cleans up behind a failure may come to other collectives than the ranks that are well.
        has_failed = self.ran_out_of_memory(sys.exc_info()[1])
        self._ask(Status.OUT_OF_MEMORY if has_failed else Status.RUNNING)
        self._raise_if_over()

    def _ask(self, status: Status) -> None:
        """Tell the others how this rank does, and learn how they do."""
        statuses = [int(told) for told in self._ranks.gather(torch.tensor(int(status)))]
        if max(statuses) > Status.DONE or min(statuses) == Status.DONE:
            self._outcome, self._rank = Status(max(statuses)), statuses.index(max(statuses))

    def _raise_if_over(self) -> None:
        if self._outcome is Status.OUT_OF_MEMORY:
            raise RuntimeError(f"CUDA out of memory, or that of the host, on rank {self._rank}.")
        if self._outcome is Status.FAILED:
            raise RuntimeError(f"Rank {self._rank} has failed in what all ranks were trying. Its own error says why.")


@contextmanager
def _before_each_collective(act: Callable[[Any], None]) -> Iterator[None]:
    """Call `act` with the process group before each collective that begins inside."""
    group_class: Any = dist.ProcessGroup
    originals = {name: vars(group_class)[name] for name in _COLLECTIVES if name in vars(group_class)}

    def acting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            # A worker goes on with what all ranks have begun, wherever they are by now.
            if not isinstance(threading.current_thread(), WorkerThread):
                act(group)
            return original(group, *args, **kwargs)

        return collective

    for name, original in originals.items():
        setattr(group_class, name, acting(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(group_class, name, original)
