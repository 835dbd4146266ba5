"""How the gradients of a bucket become those that every rank shall have, of all of it or of its share.

A new way to reduce (fewer bits, a part for each rank) is a class with the two methods of `bucket.Reduction`, in a file
of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives, Pending
from lightning_bucketddp.reducer.bucket import DenseBucket, PendingReduction
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
