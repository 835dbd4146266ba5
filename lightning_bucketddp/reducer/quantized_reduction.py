"""The mean over the ranks, of gradients that travel as 8 bits each.

Note: two exchanges
    Every rank turns a bucket into rows of blocks (Note: blocks), one row for each rank, and gets its row of all ranks.
    It computes their mean in fp32, turns that into blocks again and gives it to all ranks. All decode the same bytes,
    so replicas stay equal. Where each rank keeps a share only, the first exchange is enough, and its mean is not
    rounded again. The flags travel beside it, as they are: what they say of numbers that are not finite must not be
    mixed.

Note: the second exchange
    It can only begin when the first has ended on this rank, and a backward does not wait for that. A GPU waits for it
    in a stream of ours, in which the rest is queued when the bucket leaves. On a host a thread waits, for one bucket
    after the other, and has connections of its own. So the order is that of the buckets in both cases, on all ranks
    (Note: one launch order). No thread queues it on a GPU, where NCCL's kernels wait for each other in the order in
    which they were launched: two threads would launch them in another order on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives, Pending
from lightning_bucketddp.comm.worker import Worker
from lightning_bucketddp.config import BLOCK_NUMEL
from lightning_bucketddp.planning.shares import Shares
from lightning_bucketddp.reducer.bucket import DenseBucket, PendingReduction
from lightning_bucketddp.reducer.lone_bucket import SparseBucket
from lightning_bucketddp.reducer.quantization import Blocks
from lightning_bucketddp.reducer.reduction import PendingSparseMean


class QuantizedMeanReduction:
    """The mean over the ranks; gradients travel as `int8`, in blocks. They arrive in their own dtype."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._on: _OnDevice | _OnHost = (
            _OnDevice(collectives) if collectives.device.type == "cuda" else _OnHost(collectives)
        )
        self._exchanges: WeakKeyDictionary[DenseBucket, _Exchange] = WeakKeyDictionary()

    def start(self, bucket: DenseBucket, *, index: int, is_last: bool) -> PendingReduction:
        numbers = bucket.numbers
        flags = bucket.wire[numbers.numel() :]
        pending_flags = self._collectives.start_mean(flags) if flags.numel() else None
        if not numbers.numel():
            return _PendingQuantized(flags.nbytes, None, pending_flags)
        exchange = self._exchanges.get(bucket)
        if exchange is None:
            exchange = self._exchanges[bucket] = _Exchange(self._collectives, numbers.numel(), bucket.shares)
        first = exchange.start_first(numbers)
        transfer, finish = self._on.follow(first, exchange, numbers)
        return _PendingQuantized(flags.nbytes + exchange.bytes_sent, transfer, pending_flags, finish)

    def start_sparse(self, bucket: SparseBucket) -> PendingReduction:
        return PendingSparseMean(self._collectives, bucket)

    def close(self) -> None:
        self._on.close()


@dataclass(frozen=True, slots=True)
class _PendingQuantized:
    bytes_sent: int
    transfer: Pending | None
    flags: Pending | None
    finish: Callable[[], None] | None = None
    has_ended = False

    def wait(self) -> None:
        if self.transfer is not None:
            self.transfer.wait()
        if self.finish is not None:
            self.finish()
        if self.flags is not None:
            self.flags.wait()


class _Exchange:
    """What the exchanges of one bucket need (Note: two exchanges)."""

    def __init__(self, collectives: Collectives, numel: int, shares: Shares | None) -> None:
        num_ranks, device = collectives.world_size, collectives.device
        self._collectives = collectives
        self._own: tuple[int, int] | None = None
        owner: int | None = None
        if shares is None:
            row_numel = -(-numel // (num_ranks * BLOCK_NUMEL)) * BLOCK_NUMEL
        else:
            owner = shares.owner
            row_numel = numel // num_ranks if owner is None else numel
            self._own = shares.bounds(numel)[collectives.rank]
        self._owner = owner
        sent, received = num_ranks if owner is None else 1, num_ranks if owner in (None, collectives.rank) else 0
        self._sent = Blocks(numel, num_rows=sent, row_numel=row_numel, device=device)
        self._received = Blocks(received * row_numel, num_rows=received, row_numel=row_numel, device=device)

    @property
    def is_for_all(self) -> bool:
        """Whether all ranks get all of it, by a second exchange."""
        return self._own is None

    @property
    def bytes_sent(self) -> int:
        num_bytes = self._sent.bytes.nbytes
        return num_bytes if self.is_for_all else num_bytes // 2  # (Note: halves, in `all_reduce_cost`)

    def start_first(self, numbers: Tensor) -> Pending:
        """Start to give each rank its row."""
        self._sent.encode(numbers)
        return self._collectives.start_exchange_of_parts(self._received.bytes, self._sent.bytes, owner=self._owner)

    def start_second(self, collectives: Collectives) -> Pending:
        """Start to give all ranks the mean of the rows that have come."""
        self._sent.encode_mean(self._received, row=collectives.rank)
        return collectives.start_exchange_of_shares(self._sent.bytes, owner=None)

    def finish(self, numbers: Tensor) -> None:
        """Overwrite `numbers`, or this rank's share of them, with the mean."""
        if self._own is None:
            self._sent.decode(numbers)
        elif self._owner in (None, self._collectives.rank):
            start, stop = self._own
            self._received.decode_mean(numbers[start:stop])


class _OnHost:
    """Goes on with what is in host memory (Note: the second exchange)."""

    def __init__(self, collectives: Collectives) -> None:
        self._follow_ups = collectives.follow_up_group()
        self._worker = Worker("bucketddp-quantized")

    def follow(self, first: Pending, exchange: _Exchange, numbers: Tensor) -> tuple[Pending, Callable[[], None] | None]:
        """Start what follows the first exchange; return its end, and what is left to do then."""
        finish = partial(exchange.finish, numbers)
        if not exchange.is_for_all:
            return first, finish
        return _Following(self._worker.submit(partial(_start_second, exchange, first, self._follow_ups))), finish

    def close(self) -> None:
        self._worker.close()


def _start_second(exchange: _Exchange, first: Pending, follow_ups: Collectives) -> Pending:
    first.wait()
    return exchange.start_second(follow_ups)


@dataclass(frozen=True, slots=True)
class _Following:
    started: Future[Pending]

    def wait(self) -> None:
        self.started.result().wait()


class _OnDevice:
    """Goes on with what is in the memory of a GPU, in a stream of its own (Note: the second exchange)."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._stream = torch.cuda.Stream(collectives.device)  # type: ignore[no-untyped-call]

    def follow(self, first: Pending, exchange: _Exchange, numbers: Tensor) -> tuple[Pending, Callable[[], None] | None]:
        """Queue what follows the first exchange; return its end, and what is left to do then."""
        with torch.cuda.stream(self._stream):
            first.wait()
            if exchange.is_for_all:
                exchange.start_second(self._collectives).wait()
            exchange.finish(numbers)
            return self._stream.record_event(), None

    def close(self) -> None:
        pass
