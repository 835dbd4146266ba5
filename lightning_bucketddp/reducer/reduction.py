"""Reductions: how a bucket gets the mean over the ranks, of all of it or of this rank's shard.

A new way to reduce is a subclass of `Reduction`, in a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives, Pending
from lightning_bucketddp.reducer.bucket import Bucket, BufferedBucket, DenseBucket, SparseBucket


@dataclass(slots=True)  # not frozen, which takes longer to make
class PendingReduction:
    """A reduction in flight."""

    bytes_sent: int  # to the network, or given to a communication hook; of a reduce-scatter the half (Note: halves)
    transfer: Pending | None  # the collective; None: it runs in `wait`
    flags: Pending | None = None  # where they travel on their own
    finish: Callable[[], object] | None = None  # called after the collective
    has_ended: bool = False  # it has ended before it was returned

    def wait(self) -> None:
        """Make the result usable: block the host on CPU, the current stream on GPU."""
        if self.flags is not None:
            self.flags.wait()
        if self.transfer is not None:
            self.transfer.wait()
        if self.finish is not None:
            self.finish()


@dataclass(eq=False)
class Reduction:
    """Starts to reduce buckets in place; all ranks start the same buckets in the same order."""

    collectives: Collectives

    def start(self, bucket: Bucket, *, index: int, is_last: bool) -> PendingReduction:
        """Start to reduce a bucket."""
        if isinstance(bucket, SparseBucket):
            # In `wait`, because the sizes have to be known first; all ranks wait in bucket order.
            return PendingReduction(bucket.num_bytes, None, finish=partial(_average_rows, bucket, self.collectives))
        return self.start_dense(bucket, index=index, is_last=is_last)

    def start_dense(self, bucket: DenseBucket, *, index: int, is_last: bool) -> PendingReduction:
        """Start to reduce a bucket whose gradients lie side by side in memory."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop threads, if there are any."""


def _average_rows(bucket: SparseBucket, collectives: Collectives) -> None:
    """Average a sparse gradient: rows of all ranks side by side, equal rows added."""
    gradient = bucket.gradient
    indices = torch.cat(collectives.gather_rows(gradient.indices().t()))
    values = torch.cat(collectives.gather_rows(gradient.values()))
    total = torch.sparse_coo_tensor(indices.t(), values, gradient.shape).coalesce()
    bucket.gradient = torch.sparse_coo_tensor(
        total.indices(), total.values() / collectives.world_size, gradient.shape, is_coalesced=True
    )


@dataclass(eq=False)
class MeanReduction(Reduction):
    """The mean over the ranks. Gradients travel as `dtype` (None: their own), and arrive in their own in any case."""

    dtype: torch.dtype | None = None
    _cast_wires: WeakKeyDictionary[DenseBucket, Tensor] = field(default_factory=WeakKeyDictionary)

    def start_dense(self, bucket: DenseBucket, *, index: int, is_last: bool) -> PendingReduction:
        own = wire = bucket.wire
        finish: Callable[[], object] | None = None
        if self.dtype is not None and self.dtype != own.dtype:
            if bucket not in self._cast_wires:
                self._cast_wires[bucket] = torch.empty_like(own, dtype=self.dtype)
            wire = self._cast_wires[bucket].copy_(own)
            finish = partial(own.copy_, wire)
        if bucket.sharding is None:
            return PendingReduction(wire.nbytes, self.collectives.start_mean(wire), finish=finish)
        num_numbers = bucket.numbers.numel()
        # Every rank needs all flags.
        flags = self.collectives.start_mean(wire[num_numbers:]) if len(wire) > num_numbers else None
        transfer = self.collectives.start_mean_of_shard(wire[:num_numbers], owner=bucket.sharding.owner)
        saved = num_numbers * wire.itemsize // 2 if self.collectives.scatters else 0
        return PendingReduction(wire.nbytes - saved, transfer, flags, finish)


@dataclass(eq=False)
class CommHookReduction(Reduction):
    """Reduces buckets by a communication hook. Sparse gradients are averaged, as without a hook."""

    hook: Callable[..., Any]
    state: object

    def start_dense(self, bucket: DenseBucket, *, index: int, is_last: bool) -> PendingReduction:
        assert isinstance(bucket, BufferedBucket)  # a hook may want to keep or to resize the buffer
        # The hook may compress what it sends, so the flags travel on their own; it may also resize the buffer (batched
        # PowerSGD does), which moves the memory that they lie in.
        flags = bucket.flags.clone()
        mean_of_flags = self.collectives.start_mean(flags) if flags.numel() else None
        future = self.hook(self.state, GradBucket(bucket, index=index, is_last=is_last))
        is_on_host = self.collectives.device.type == "cpu"
        if is_on_host:
            # gloo runs a hook's callbacks in its few threads, where PowerSGD's start collectives and wait for them:
            # with two buckets in flight their order differs between ranks, and no thread may be left for them. NCCL's
            # callbacks have run by now, in this thread.
            future.wait()

        def take_result() -> None:
            reduced = future.wait()
            # torch's own hooks return the tensor or a list of one.
            reduced = reduced[0] if isinstance(reduced, list | tuple) else reduced
            if reduced.data_ptr() != bucket.buffer.data_ptr():
                bucket.buffer.copy_(reduced.view_as(bucket.buffer))
            if mean_of_flags is not None:
                bucket.flags.copy_(flags)

        return PendingReduction(bucket.num_bytes, future, mean_of_flags, take_result, has_ended=is_on_host)


class GradBucket:
    """A bucket with the interface of `torch.distributed.GradBucket`, for a communication hook."""

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
        # Not copied into the bucket: the half precision of a wrapper is to travel.
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        bucket = self._bucket
        return bucket.views if self._buffer is bucket.buffer else bucket.views_of(self._buffer)

    def parameters(self) -> list[Tensor]:
        return self._bucket.params

    def is_last(self) -> bool:
        return self._is_last
