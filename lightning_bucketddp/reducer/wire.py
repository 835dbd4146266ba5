"""What a bucket looks like on the network, and how it is reduced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives, Pending
from lightning_bucketddp.reducer.bucket import Bucket, LoneBucket, SparseBucket


class Reduction(Protocol):
    """Turns a bucket's gradients into those that every rank shall have."""

    def start(self, bucket: Bucket | LoneBucket, *, index: int, is_last: bool) -> Pending:
        """Start reducing `bucket` in place."""


class MeanReduction:
    """The mean over the ranks.

    Args:
        collectives: how to reach the other ranks.
        dtype: what travels; None: the gradients' own dtype. They arrive in their own dtype in any case.
    """

    def __init__(self, collectives: Collectives, *, dtype: torch.dtype | None = None) -> None:
        self._collectives = collectives
        self._dtype = dtype
        self._cast_wires: WeakKeyDictionary[Bucket | LoneBucket, Tensor] = WeakKeyDictionary()

    def start(self, bucket: Bucket | LoneBucket, *, index: int, is_last: bool) -> Pending:
        own = bucket.wire
        if self._dtype is None or self._dtype == own.dtype:
            return self._collectives.start_mean(own)
        if bucket not in self._cast_wires:
            self._cast_wires[bucket] = torch.empty_like(own, dtype=self._dtype)
        wire = self._cast_wires[bucket].copy_(own)
        return _PendingCast(own, wire=wire, mean=self._collectives.start_mean(wire))


@dataclass(frozen=True, slots=True)
class _PendingCast:
    own: Tensor
    wire: Tensor
    mean: Pending

    def wait(self) -> None:
        self.mean.wait()
        self.own.copy_(self.wire)


@dataclass(frozen=True, slots=True)
class CommHookReduction:
    """Whatever a communication hook written for torch DDP makes of the bucket."""

    collectives: Collectives
    hook: Callable[..., Any]
    state: object

    def start(self, bucket: Bucket | LoneBucket, *, index: int, is_last: bool) -> Pending:
        assert isinstance(bucket, Bucket)  # a hook may want to keep or to resize the buffer
        # The hook may compress what it sends, so the flags travel on their own; it may also resize the buffer (batched
        # PowerSGD does), which moves the memory that they lie in.
        flags = bucket.flags.clone()
        mean_of_flags = self.collectives.start_mean(flags) if flags.numel() else None
        view = GradBucket(bucket, index=index, is_last=is_last)
        future = self.hook(self.state, view)
        if self.collectives.device.type == "cpu":
            # gloo runs a hook's callbacks in its few threads, where PowerSGD's start collectives and wait for them:
            # with two buckets on the way their order is not the same on all ranks, and no thread may be left for them.
            # NCCL's callbacks have run by now, in this thread.
            future.wait()
        return _PendingHook(bucket, future=future, flags=flags, mean_of_flags=mean_of_flags)


class GradBucket:
    """A bucket as `torch.distributed.GradBucket` shows it to a communication hook."""

    def __init__(self, bucket: Bucket, *, index: int, is_last: bool) -> None:
        self._bucket = bucket
        self._index = index
        self._is_last = is_last
        self._buffer = bucket.buffer

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        # Not copied into the bucket: a wrapper that rounds to half precision wants that to travel.
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        bucket = self._bucket
        return bucket.views if self._buffer is bucket.buffer else bucket.views_of(self._buffer)

    def parameters(self) -> list[Tensor]:
        return self._bucket.params

    def is_last(self) -> bool:
        return self._is_last


@dataclass(frozen=True, slots=True)
class _PendingHook:
    bucket: Bucket
    future: torch.futures.Future[Any]
    flags: Tensor
    mean_of_flags: Pending | None

    def wait(self) -> None:
        reduced = self.future.wait()
        # torch's own hooks return the tensor or a list of one.
        reduced = reduced[0] if isinstance(reduced, list | tuple) else reduced
        if reduced.data_ptr() != self.bucket.buffer.data_ptr():
            self.bucket.buffer.copy_(reduced.view_as(self.bucket.buffer))
        if self.mean_of_flags is not None:
            self.mean_of_flags.wait()
            self.bucket.flags.copy_(self.flags)


@dataclass(frozen=True, slots=True)
class SparseMean:
    """The mean of a sparse gradient: rows of all ranks side by side, equal rows added.

    Everything happens in `wait`, because the sizes have to be known first; all ranks wait in bucket order.
    """

    collectives: Collectives
    bucket: SparseBucket

    def wait(self) -> None:
        gradient = self.bucket.gradient
        indices = torch.cat(self.collectives.gather_rows(gradient.indices().t()))
        values = torch.cat(self.collectives.gather_rows(gradient.values()))
        total = torch.sparse_coo_tensor(indices.t(), values, gradient.shape).coalesce()
        mean = torch.sparse_coo_tensor(
            total.indices(), total.values() / self.collectives.world_size, gradient.shape, is_coalesced=True
        )
        self.bucket.gradient = mean


def transfer_of(pending: Pending) -> Pending | None:
    """What ends when the network has done its part of a reduction; None: not before `wait` returns."""
    if isinstance(pending, _PendingCast):
        return pending.mean
    if isinstance(pending, _PendingHook):
        return pending.future
    return None if isinstance(pending, SparseMean) else pending


def was_waited_for(pending: Pending) -> bool:
    """Whether the reduction had ended when it was started: see `CommHookReduction`."""
    return isinstance(pending, _PendingHook) and pending.bucket.buffer.device.type == "cpu"


def bytes_sent(pending: Pending, bucket: Bucket | LoneBucket | SparseBucket) -> int:
    """What a reduction gives to the network, or to a communication hook."""
    return pending.wire.nbytes if isinstance(pending, _PendingCast) else bucket.num_bytes
