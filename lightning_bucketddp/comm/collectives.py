"""Collectives over a process group; backend differences live here.

Note: tensors in flight
    A thread of gloo's drops an operation a moment after it has ended. If it holds the last reference to a tensor, it
    needs the GIL to free it; but destroying a group waits for the group's threads and keeps the GIL: both wait for
    ever. So tensors of groups that are to be closed are referenced here, too, until gloo has dropped them.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from lightning_bucketddp.comm import process_group
from lightning_bucketddp.comm.connections import gloo_interface
from lightning_bucketddp.comm.process_group import ForeignCollectives

# Broadcasting thousands of small tensors one by one costs a round trip each; larger chunks only cost memory.
_BROADCAST_CHUNK_BYTES = 64 * 2**20
# Since torch 2.13 under other names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# The source files in which a thread is that waits for other ranks.
FILES_OF_COLLECTIVES = (__file__, process_group.__file__, dist.distributed_c10d.__file__)
# Longer than a thread waits for its turn on a busy machine.
_DROPS_WITHIN_S = 1.0


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> Any:
        """Make the result usable: blocks the host on CPU, the current stream on GPU."""


@dataclass(frozen=True, slots=True)
class PendingGather:
    """A gather in flight."""

    work: dist.Work
    gathered: list[Tensor]  # by rank

    def wait(self) -> list[Tensor]:
        self.work.wait()
        return self.gathered


class Collectives:
    """Collectives over one process group, for tensors on one device.

    Args:
        group: the process group; the default group if None.
        timeout: how long a collective of the further groups may take; None: torch's default.
        parts: the ranks of this group and of those beside it, which make further groups together; None: it is alone.
        on_one_host: whether all ranks are on this host: other hosts shall not reach further groups.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        parts: list[list[int]] | None = None,
        on_one_host: bool = False,
    ) -> None:
        # In a further group of gloo: tensors that its operations may still hold (Note: tensors in flight).
        is_closable = group is not None and dist.get_backend(group) == "gloo"
        self._in_flight: deque[Tensor] | None = deque() if is_closable else None
        self.device = device
        self._timeout = timeout
        self._on_one_host = on_one_host
        self._world = dist.group.WORLD
        assert self._world is not None  # torch.distributed is initialised
        self.group = group if group is not None else self._world
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        # By rank in this group: the rank in the run, which users know.
        self.global_ranks = dist.get_process_group_ranks(self.group)
        self._parts = parts or [self.global_ranks]
        # Made once: `dist.all_reduce` makes them each time, after checks that cannot fail here.
        self._asynchronously = {op: _asynchronously(op) for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)}
        self._group_averages = self._probe_average()
        if dist.get_backend(self.group) == "gloo":
            # A program may end now, and others may still be connecting to this rank, or asking its store for addresses.
            dist.barrier(self.group)
        factor = torch.tensor(1 / self.world_size, dtype=torch.float64)
        self._factors = {dtype: factor.to(dtype) for dtype in (torch.float32, torch.float64)}
        self._further: dict[str, Collectives] = {}

    @cached_property
    def foreign(self) -> ForeignCollectives:
        """Counts the collectives of users in this group. It holds the group, and is shared by all that use it."""
        return ForeignCollectives(self.group)

    @property
    def global_rank(self) -> int:
        """Return which rank of the run this one is."""
        return self.global_ranks[self.rank]

    @property
    def is_open(self) -> bool:
        """Return whether the process group is still there, and has not been destroyed or replaced."""
        return dist.is_initialized() and dist.group.WORLD is self._world

    def close_host_groups(self) -> None:
        """Destroy the further groups of gloo, each of which has threads and a connection to every rank.

        No operation may be in flight in them: destroying a group waits for it, while all threads of the program wait.
        """
        for name, further in list(self._further.items()):
            further.close_host_groups()
            if self.is_open and further.has_all_tensors_back():
                del self._further[name]
                dist.destroy_process_group(further.group)
                del further.group  # whose connections last as long as it is held

    def has_all_tensors_back(self) -> bool:
        """Wait a little until no tensor is in flight; return whether that is so. False in groups that never close."""
        if self._in_flight is None:
            return False
        deadline = time.monotonic() + _DROPS_WITHIN_S
        while not (is_back := all(map(_is_only_ours, self._in_flight))) and time.monotonic() < deadline:
            time.sleep(0.001)
        return is_back

    def _hold(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Return `tensors`, all those of one operation of this group (Note: tensors in flight)."""
        if self._in_flight is None:
            return tensors
        while self._in_flight and _is_only_ours(self._in_flight[0]):
            self._in_flight.popleft()
        # Not one by one: a tensor that the operation has not got yet looks like one that it has dropped.
        held = [tensor.detach() for tensor in tensors]
        self._in_flight += held
        return held

    def gradient_group(self) -> Collectives:
        """Return the same ranks for reductions that run beside a backward, in which users may have collectives, too.

        With gloo over connections of their own: when a rank reduces depends on which parameters it uses. With NCCL in
        the same group (Note: collectives of users, in `launch_queue`).
        """
        is_shared = self.device.type != "cpu" or self.world_size == 1
        return self if is_shared else self.further_group("gradient")

    def host_group(self) -> Collectives:
        """Return the same ranks for tensors in host memory, over connections of their own, with gloo."""
        return self.further_group("host", in_host_memory=True)

    def split(self, parts: Sequence[Sequence[int]]) -> Collectives:
        """Return the part of the ranks that this one is in. All ranks must call this.

        All ranks must then make the further groups of their parts together.
        """
        return self._in_new_group([[self.global_ranks[rank] for rank in part] for part in parts], self.device, None)

    def _in_new_group(self, parts: list[list[int]], device: torch.device, backend: str | None) -> Collectives:
        with gloo_interface(on_one_host=self._on_one_host):
            groups = [dist.new_group(ranks, timeout=self._timeout, backend=backend) for ranks in parts]
        own = next(index for index, ranks in enumerate(parts) if self.global_rank in ranks)
        return Collectives(device, group=groups[own], timeout=self._timeout, parts=parts, on_one_host=self._on_one_host)

    def further_group(self, name: str, *, in_host_memory: bool = False) -> Collectives:
        """Return the same ranks over connections of their own, made once for each `name`.

        Collectives of two groups need no common order.
        """
        if name not in self._further:
            device, backend = (torch.device("cpu"), "gloo") if in_host_memory else (self.device, None)
            self._further[name] = self._in_new_group(self._parts, device, backend)
        return self._further[name]

    def start_mean(self, tensor: Tensor) -> Pending:
        """Start replacing a real `tensor` by its mean over the ranks."""
        return self._start_all_reduce(tensor, self._prepare_mean(tensor))

    def _prepare_mean(self, tensor: Tensor) -> dist.ReduceOp.RedOpType:
        """Return the operation that makes the mean of `tensor`, which is divided before a sum."""
        # fp16 is divided before the sum in any case: the sum of a few large gradients overflows.
        if self._group_averages and tensor.dtype != torch.float16:
            return dist.ReduceOp.AVG
        # A tensor as a factor takes half the time of a number, but is rounded to a dtype that has few digits.
        factor = self._factors.get(tensor.dtype) if tensor.is_cpu else None
        tensor.mul_(1 / self.world_size if factor is None else factor)
        return dist.ReduceOp.SUM

    @property
    def scatters(self) -> bool:
        """Return whether `start_mean_of_shard` sends half of what `start_mean` does: to each rank its shard only."""
        return self.device.type != "cpu"  # gloo's reduce-scatter takes longer than its all-reduce

    def start_mean_of_shard(self, tensor: Tensor, *, owner: int | None) -> Pending:
        """Start replacing this rank's shard of a real `tensor` by its mean over the ranks; the rest of it is lost.

        Rank `owner` has all of it as its shard; None: each rank has one of equal slices, by rank.
        """
        if not self.scatters:
            return self.start_mean(tensor)
        op = self._prepare_mean(tensor)
        work: dist.Work
        if owner is not None:
            work = dist.reduce(tensor, dst=self.global_ranks[owner], op=op, group=self.group, async_op=True)
        else:
            own = tensor.view(self.world_size, -1)[self.rank]
            work = _reduce_scatter_single(own, tensor, op=op, group=self.group, async_op=True)
        return work

    def start_gather_of_shards(self, tensor: Tensor, *, owner: int | None) -> Pending:
        """Start sending this rank's shard of `tensor` to all ranks; see `start_mean_of_shard`."""
        work: dist.Work
        if owner is not None:
            [held] = self._hold(tensor)
            work = dist.broadcast(held, src=self.global_ranks[owner], group=self.group, async_op=True)
        else:
            whole, own = self._hold(tensor, tensor.view(self.world_size, -1)[self.rank])
            work = _all_gather_single(whole, own, group=self.group, async_op=True)
        return work

    def start_all_to_all(self, received: Tensor, sent: Tensor, *, owner: int | None) -> Pending:
        """Start sending each rank its slice of `sent`; `received` gets the slices that all ranks send to this one.

        Rank `owner` gets everything that is sent; None: each rank gets one of equal slices.
        """
        work: dist.Work
        received, sent = self._hold(received, sent)
        if owner is None:
            work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        else:
            parts = list(received.view(self.world_size, -1).unbind()) if owner == self.rank else None
            work = dist.gather(sent, parts, dst=self.global_ranks[owner], group=self.group, async_op=True)
        return work

    def sum(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over the ranks."""
        [held] = self._hold(tensor)
        dist.all_reduce(held, op=dist.ReduceOp.SUM, group=self.group)

    def maximum(self, tensor: Tensor) -> None:
        """Replace `tensor` by its maximum over the ranks, element by element."""
        [held] = self._hold(tensor)
        dist.all_reduce(held, op=dist.ReduceOp.MAX, group=self.group)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return this tensor of every rank, by rank; shape and dtype must be equal everywhere."""
        tensor = tensor.contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        *held, own = self._hold(*gathered, tensor)
        dist.all_gather(held, own, group=self.group)
        return gathered

    def start_gather(self, tensor: Tensor) -> PendingGather:
        """Start gathering this tensor of every rank; shape and dtype must be equal everywhere."""
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        *held, own = self._hold(*gathered, tensor)
        return PendingGather(dist.all_gather(held, own, group=self.group, async_op=True), gathered)

    def gather_rows(self, tensor: Tensor) -> list[Tensor]:
        """Return this tensor of every rank, by rank; the number of rows may differ between ranks."""
        num_rows = torch.tensor([tensor.shape[0]], device=self.device)
        rows_by_rank = [int(n) for n in torch.cat(self.gather(num_rows)).tolist()]
        padded = tensor.new_zeros((max(rows_by_rank), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        return [rows[:n] for rows, n in zip(self.gather(padded), rows_by_rank, strict=True)]

    def send(self, tensor: Tensor, *, destination: int) -> None:
        """Send a dense `tensor` to rank `destination`, which must `receive` it."""
        self._exchange(dist.isend, tensor.contiguous(), other=destination)

    def receive(self, tensor: Tensor, *, source: int) -> None:
        """Overwrite a contiguous `tensor` with the one that rank `source` sends."""
        self._exchange(dist.irecv, tensor, other=source)

    def gather_json(self, value: Any) -> list[Any]:
        """Return this JSON value of every rank, by rank."""
        return [json.loads(bytes(raw.tolist())) for raw in self.gather_rows(self._to_json(value))]

    def broadcast_json(self, value: Any, *, source: int = 0) -> Any:
        """Return the JSON value that `source` has; the others' values are ignored."""
        raw = self._to_json(value if self.rank == source else None)
        size = torch.tensor([raw.numel()], device=self.device)
        self._broadcast(size, source)
        raw = raw if self.rank == source else raw.new_empty(int(size))
        self._broadcast(raw, source)
        return json.loads(bytes(raw.tolist()))

    def _to_json(self, value: Any) -> Tensor:
        return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.device)

    def broadcast_tensors(self, tensors: Sequence[Tensor], *, source: int = 0) -> None:
        """Overwrite `tensors` with those of `source`, many at a time."""
        if self.world_size == 1:
            return
        with torch.no_grad():
            for chunk in chunks_of_one_dtype(tensors):
                flat = torch.cat([t.reshape(-1) for t in chunk])
                self._broadcast(torch.view_as_real(flat) if flat.is_complex() else flat, source)
                if self.rank != source:
                    slices = torch.split(flat, [t.numel() for t in chunk])
                    for tensor, values in zip(chunk, slices, strict=True):
                        # A graph kept for a second backward may hold this tensor: it gets rank `source`'s value
                        # without the "modified by an inplace operation" error.
                        with _unsafe_preserve_version_counter(tensor):
                            tensor.copy_(values.view_as(tensor))

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        [held] = self._hold(tensor)
        dist.broadcast(held, src=self.global_ranks[source], group=self.group)

    def _exchange(self, operation: Callable[..., Any], tensor: Tensor, *, other: int) -> None:
        if tensor.numel() == 0:
            return
        # As bytes: backends do not know all dtypes. As a batch of one: NCCL then uses the communicator of the group
        # instead of making one for each pair of ranks.
        [raw] = self._hold(tensor.view(-1).view(torch.uint8))
        operations = [dist.P2POp(operation, raw, self.global_ranks[other], self.group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def _start_all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> dist.Work:
        work: dist.Work = self.group.allreduce(list(self._hold(tensor)), self._asynchronously[op])
        return work

    def _probe_average(self) -> bool:
        """Return whether the backend averages by itself: NCCL does, others may not."""
        if self.device.type == "cpu":
            return False  # gloo may, but in a thread and a pass of its own, when the tensor has left the caches
        try:
            self._start_all_reduce(torch.ones(1, device=self.device), dist.ReduceOp.AVG).wait()
        except (RuntimeError, ValueError):
            return False
        return True


def _asynchronously(op: dist.ReduceOp.RedOpType) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]
    if hasattr(options, "asyncOp"):  # since torch 2.7; all operations are, before
        options.asyncOp = True
    return options


def all_gather(tensor: Tensor, *, group: dist.ProcessGroup | None, sync_grads: bool) -> Tensor:
    """Return `tensor` of every rank, stacked by rank; with `sync_grads`, gradients flow back to each rank's tensor."""
    if not (dist.is_available() and dist.is_initialized()):
        return tensor
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        gathered: Tensor = _AllGather.apply(tensor, group or dist.group.WORLD)  # type: ignore[no-untyped-call]
    return gathered


class _AllGather(torch.autograd.Function):
    """Replaces `torch.distributed.nn.functional.all_gather`, which warns since torch 2.13."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        tensor = tensor.contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor, group=group)
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        gradient = grad_output.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[dist.get_rank(ctx.group)], None


def _is_only_ours(tensor: Tensor) -> bool:
    return int(tensor._use_count()) == 1  # type: ignore[attr-defined]


def chunks_of_one_dtype(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield `tensors` some at a time, all of one dtype and together not too large."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        chunk: list[Tensor] = []
        for tensor in [tensor for tensor in tensors if tensor.dtype == dtype]:
            if chunk and sum(t.nbytes for t in chunk) + tensor.nbytes > _BROADCAST_CHUNK_BYTES:
                yield chunk
                chunk = []
            chunk.append(tensor)
        yield chunk
