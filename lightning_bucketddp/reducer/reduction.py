"""How the gradients of a bucket become those that every rank shall have, of all of it or of its share.

A new way to reduce (fewer bits, a part for each rank) is a class with the two methods of `bucket.Reduction`, in a file
of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives, Pending
from lightning_bucketddp.reducer.bucket import BufferedBucket, DenseBucket, PendingReduction
from lightning_bucketddp.reducer.lone_bucket import SparseBucket


class MeanReduction:
    """The mean over the ranks.

    Args:
        dtype: what travels; None: the gradients' own dtype. They arrive in their own dtype in any case.
    """

    def __init__(self, collectives: Collectives, *, dtype: torch.dtype | None = None) -> None:
        self._collectives = collectives
        self._dtype = dtype
        self._cast_wires: WeakKeyDictionary[DenseBucket, Tensor] = WeakKeyDictionary()

    def start(self, bucket: DenseBucket, *, index: int, is_last: bool) -> PendingReduction:
        own = bucket.wire
        if self._dtype is None or self._dtype == own.dtype:
            return self._start_mean(bucket, own)
        if bucket not in self._cast_wires:
            self._cast_wires[bucket] = torch.empty_like(own, dtype=self._dtype)
        wire = self._cast_wires[bucket].copy_(own)
        return _PendingCast(self._start_mean(bucket, wire), wire, own)

    def _start_mean(self, bucket: DenseBucket, wire: Tensor) -> _PendingMean:
        if bucket.shares is None:
            return _PendingMean(wire.nbytes, self._collectives.start_mean(wire))
        num_numbers = bucket.numbers.numel()
        # Every rank needs all flags.
        flags = self._collectives.start_mean(wire[num_numbers:]) if len(wire) > num_numbers else None
        transfer = self._collectives.start_mean_of_share(wire[:num_numbers], owner=bucket.shares.owner)
        saved = num_numbers * wire.itemsize // 2 if self._collectives.scatters else 0
        return _PendingMean(wire.nbytes - saved, transfer, flags)

    def start_sparse(self, bucket: SparseBucket) -> PendingReduction:
        return PendingSparseMean(self._collectives, bucket)

    def close(self) -> None:
        pass


@dataclass(slots=True)  # not frozen, which takes longer to make
class _PendingMean:
    bytes_sent: int
    transfer: Pending
    flags: Pending | None = None
    has_ended = False

    def wait(self) -> None:
        if self.flags is not None:
            self.flags.wait()
        self.transfer.wait()


@dataclass(frozen=True, slots=True)
class _PendingCast:
    mean: _PendingMean
    wire: Tensor
    own: Tensor
    has_ended = False

    @property
    def bytes_sent(self) -> int:
        return self.mean.bytes_sent

    @property
    def transfer(self) -> Pending:
        return self.mean.transfer

    def wait(self) -> None:
        self.mean.wait()
        self.own.copy_(self.wire)


@dataclass(frozen=True, slots=True)
class PendingSparseMean:
    """The mean of a sparse gradient: rows of all ranks side by side, equal rows added.

    Everything happens in `wait`, because the sizes have to be known first; all ranks wait in bucket order.
    """

    collectives: Collectives
    bucket: SparseBucket
    transfer = None
    has_ended = False

    @property
    def bytes_sent(self) -> int:
        return self.bucket.num_bytes

    def wait(self) -> None:
        gradient = self.bucket.gradient
        indices = torch.cat(self.collectives.gather_rows(gradient.indices().t()))
        values = torch.cat(self.collectives.gather_rows(gradient.values()))
        total = torch.sparse_coo_tensor(indices.t(), values, gradient.shape).coalesce()
        self.bucket.gradient = torch.sparse_coo_tensor(
            total.indices(), total.values() / self.collectives.world_size, gradient.shape, is_coalesced=True
        )


@dataclass(frozen=True, slots=True)
class CommHookReduction:
    """Whatever a communication hook makes of a bucket. Sparse gradients are averaged, as without a hook."""

    collectives: Collectives
    hook: Callable[..., Any]
    state: object

    def start(self, bucket: DenseBucket, *, index: int, is_last: bool) -> PendingReduction:
        assert isinstance(bucket, BufferedBucket)  # a hook may want to keep or to resize the buffer
        # The hook may compress what it sends, so the flags travel on their own; it may also resize the buffer (batched
        # PowerSGD does), which moves the memory that they lie in.
        flags = bucket.flags.clone()
        mean_of_flags = self.collectives.start_mean(flags) if flags.numel() else None
        view = GradBucket(bucket, index=index, is_last=is_last)
        future = self.hook(self.state, view)
        is_on_host = self.collectives.device.type == "cpu"
        if is_on_host:
            # gloo runs a hook's callbacks in its few threads, where PowerSGD's start collectives and wait for them:
            # with two buckets on the way their order is not the same on all ranks, and no thread may be left for them.
            # NCCL's callbacks have run by now, in this thread.
            future.wait()
        return _PendingHook(bucket, future, flags, mean_of_flags, has_ended=is_on_host)

    def start_sparse(self, bucket: SparseBucket) -> PendingReduction:
        return PendingSparseMean(self.collectives, bucket)

    def close(self) -> None:
        pass


class GradBucket:
    """A bucket as `torch.distributed.GradBucket` shows it to a communication hook."""

    def __init__(self, bucket: BufferedBucket, *, index: int, is_last: bool) -> None:
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
    bucket: BufferedBucket
    transfer: torch.futures.Future[Any]
    flags: Tensor
    mean_of_flags: Pending | None
    has_ended: bool

    @property
    def bytes_sent(self) -> int:
        return self.bucket.num_bytes

    def wait(self) -> None:
        reduced = self.transfer.wait()
        # torch's own hooks return the tensor or a list of one.
        reduced = reduced[0] if isinstance(reduced, list | tuple) else reduced
        if reduced.data_ptr() != self.bucket.buffer.data_ptr():
            self.bucket.buffer.copy_(reduced.view_as(self.bucket.buffer))
        if self.mean_of_flags is not None:
            self.mean_of_flags.wait()
            self.bucket.flags.copy_(self.flags)
