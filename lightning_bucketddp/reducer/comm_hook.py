"""Communication hooks that were written for torch DDP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives, Pending
from lightning_bucketddp.reducer.bucket import BufferedBucket, DenseBucket, PendingReduction
from lightning_bucketddp.reducer.lone_bucket import SparseBucket
from lightning_bucketddp.reducer.reduction import PendingSparseMean


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
