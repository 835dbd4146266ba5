"""The mean over the ranks, of gradients that travel as 8 bits each.

Note: two exchanges
    All ranks decode the same bytes, so replicas stay equal. Each rank gets its row of blocks (Note: blocks) of all
    ranks, and gives their mean to all, as blocks again. Two ranks give each other all they have, and do not round the
    mean; nor is it rounded where each rank keeps a share only. Flags travel beside it, as they are: what they say of
    numbers that are not finite must not be mixed.

Note: the second exchange
    It begins when the first has ended on this rank, in the order of the buckets on all ranks (Note: one launch order).
    A GPU waits in a stream of ours, in which the rest is queued when the bucket leaves; no thread may queue it there
    (docs/design/int8.md). On a host a thread waits, for one bucket after the other, and has connections of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol
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
            exchange = self._exchanges[bucket] = _exchange_of(self._collectives, numbers.numel(), bucket.shares)
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


class _Exchange(Protocol):
    """How the ranks come to the mean of one bucket (Note: two exchanges)."""

    @property
    def bytes_sent(self) -> int:
        """What is given to the network, as an all-reduce counts it."""

    def start_first(self, numbers: Tensor) -> Pending:
        """Start to send what this rank has."""

    def finish(self, numbers: Tensor) -> None:
        """Overwrite `numbers`, or this rank's share of them, with the mean."""


def _exchange_of(collectives: Collectives, numel: int, shares: Shares | None) -> _Exchange:
    if shares is not None:
        return _ForShares(collectives, numel, shares)
    return _ForAll(collectives, numel) if collectives.world_size > 2 else _ForTwo(collectives, numel)


class _ForAll:
    """Each rank computes the mean of one row, and gives it to all."""

    def __init__(self, collectives: Collectives, numel: int) -> None:
        self._collectives = collectives
        num_ranks = collectives.world_size
        row_numel = -(-numel // (num_ranks * BLOCK_NUMEL)) * BLOCK_NUMEL
        make_rows = partial(Blocks, num_rows=num_ranks, row_numel=row_numel, device=collectives.device)
        self._sent, self._received = make_rows(numel), make_rows(num_ranks * row_numel)

    @property
    def bytes_sent(self) -> int:
        return self._sent.bytes.nbytes

    def start_first(self, numbers: Tensor) -> Pending:
        self._sent.encode(numbers)
        return self._collectives.start_exchange_of_parts(self._received.bytes, self._sent.bytes, owner=None)

    def start_second(self, collectives: Collectives) -> Pending:
        """Start to give all ranks the mean of the rows that have come."""
        self._sent.encode_mean(self._received, row=collectives.rank)
        return collectives.start_exchange_of_shares(self._sent.bytes, owner=None)

    def finish(self, numbers: Tensor) -> None:
        self._sent.decode(numbers)


class _ForTwo:
    """Both ranks get all that the other has, which is as much as two exchanges of halves, and rounded once."""

    def __init__(self, collectives: Collectives, numel: int) -> None:
        self._collectives = collectives
        num_ranks, device = collectives.world_size, collectives.device
        self._all = Blocks(num_ranks * numel, num_rows=num_ranks, row_numel=numel, device=device)
        own = self._all.bytes.view(num_ranks, -1)[collectives.rank]
        self._own = Blocks(numel, num_rows=1, row_numel=numel, device=device, memory=own)

    @property
    def bytes_sent(self) -> int:
        return self._own.bytes.nbytes

    def start_first(self, numbers: Tensor) -> Pending:
        self._own.encode(numbers)
        return self._collectives.start_exchange_of_shares(self._all.bytes, owner=None)

    def finish(self, numbers: Tensor) -> None:
        self._all.decode_mean(numbers)


class _ForShares:
    """Each rank keeps the mean of its share, which is rounded once."""

    def __init__(self, collectives: Collectives, numel: int, shares: Shares) -> None:
        self._collectives = collectives
        self._owner = shares.owner
        self._share = slice(*shares.bounds(numel)[collectives.rank])
        num_ranks = collectives.world_size
        row_numel = numel // num_ranks if shares.owner is None else numel
        self._receives = shares.owner in (None, collectives.rank)
        sent, received = num_ranks if shares.owner is None else 1, num_ranks if self._receives else 0
        self._sent = Blocks(numel, num_rows=sent, row_numel=row_numel, device=collectives.device)
        self._received = Blocks(received * row_numel, num_rows=received, row_numel=row_numel, device=collectives.device)

    @property
    def bytes_sent(self) -> int:
        return self._sent.bytes.nbytes // 2  # (Note: halves, in `all_reduce_cost`)

    def start_first(self, numbers: Tensor) -> Pending:
        self._sent.encode(numbers)
        return self._collectives.start_exchange_of_parts(self._received.bytes, self._sent.bytes, owner=self._owner)

    def finish(self, numbers: Tensor) -> None:
        if self._receives:
            self._received.decode_mean(numbers[self._share])


class _OnHost:
    """Goes on with what is in host memory (Note: the second exchange)."""

    def __init__(self, collectives: Collectives) -> None:
        self._follow_ups, self._worker = collectives, None
        if collectives.world_size > 2:
            self._follow_ups = collectives.follow_up_group()
            self._worker = Worker("bucketddp-quantized")

    def follow(self, first: Pending, exchange: _Exchange, numbers: Tensor) -> tuple[Pending, Callable[[], None] | None]:
        """Start what follows the first exchange; return its end, and what is left to do then."""
        finish = partial(exchange.finish, numbers)
        if self._worker is None or not isinstance(exchange, _ForAll):
            return first, finish
        return _Following(self._worker.submit(partial(_start_second, exchange, first, self._follow_ups))), finish

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _start_second(exchange: _ForAll, first: Pending, follow_ups: Collectives) -> Pending:
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
            if isinstance(exchange, _ForAll):
                exchange.start_second(self._collectives).wait()
            exchange.finish(numbers)
            return self._stream.record_event(), None

    def close(self) -> None:
        pass
