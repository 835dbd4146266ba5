"""The mean of gradients that travel as int8: in blocks of 256, each with a scale of its own.

The largest absolute value of a block becomes 127, and all others are rounded to the nearest multiple of a 127th of it.
A number that is not finite makes the scale of its block infinite or nan, and so the whole block.

Note: two exchanges
    All ranks decode the same bytes, so replicas stay equal. Each rank receives its row of blocks from all ranks, and
    sends their mean to all, as blocks again. Two ranks exchange all blocks at once, and do not round the mean; nor is
    it rounded where each rank keeps a shard only. Flags travel beside it unquantized.

    The second exchange begins when the first has ended on this rank, in bucket order on all ranks. A GPU waits in a
    stream of ours, in which the rest is queued when the bucket leaves; no thread may queue it there
    (docs/design/int8.md). On a host a thread waits, for one bucket after the other, and has connections of its own.
"""

from __future__ import annotations

import math
import statistics
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives, Pending
from lightning_bucketddp.config import BLOCK_NUMEL, MIB, REDUCE_DTYPES, ReducerConfig
from lightning_bucketddp.planning.cost import Codec, Codecs
from lightning_bucketddp.planning.plan import Sharding
from lightning_bucketddp.processes import Worker
from lightning_bucketddp.reducer.bucket import DenseBucket
from lightning_bucketddp.reducer.reduction import CommHookReduction, MeanReduction, PendingReduction, Reduction

# A little less than a 127th: the largest number of a dtype must not become infinite.
_SCALE_OF_LARGEST = (1 - 2**-22) / 127
# A block whose largest number is smaller is zero: its scale would have no inverse.
_SMALLEST = 1e-30
_SCALE_BYTES = 4
# How many numbers are computed at a time, which bounds the temporary memory.
_NUMEL_AT_A_TIME = {"cpu": 2**20, "accelerator": 2**24}


class Blocks:
    """Numbers in rows of equal length, as bytes: in each row the integers of all blocks, then their scales.

    Args:
        numel: how many numbers there are; the last rows may have room for more.
        row_numel: the length of a row; its last block is padded.
        memory: zeros, in which the bytes are; None: they are allocated.
    """

    def __init__(
        self, numel: int, *, num_rows: int, row_numel: int, device: torch.device, memory: Tensor | None = None
    ) -> None:
        num_blocks = -(-row_numel // BLOCK_NUMEL)
        row_bytes = num_blocks * (BLOCK_NUMEL + _SCALE_BYTES)
        # Zeros: the padding of a block must never hold anything else.
        if memory is None:
            memory = torch.zeros(num_rows * row_bytes, dtype=torch.uint8, device=device)
        self.bytes = memory
        integers, scales = self.bytes.view(num_rows, row_bytes).tensor_split([num_blocks * BLOCK_NUMEL], dim=1)
        self._integers = integers.view(torch.int8).view(num_rows, num_blocks, BLOCK_NUMEL)
        self._scales = scales.view(torch.float32).unsqueeze(-1)
        self._max_blocks = _NUMEL_AT_A_TIME["cpu" if device.type == "cpu" else "accelerator"] // BLOCK_NUMEL
        self._slabs = list(self._divide(numel, row_numel))

    def encode(self, numbers: Tensor) -> None:
        for slab in self._slabs:
            _encode(slab.of(numbers), slab.integers, slab.scales)

    def decode(self, numbers: Tensor) -> None:
        for slab in self._slabs:
            torch.mul(slab.integers, slab.scales, out=slab.of(numbers))

    def encode_mean(self, of: Blocks, *, row: int) -> None:
        """Encode the mean of all rows of another as one row."""
        for blocks, mean in of.means():
            _encode(mean, self._integers[row, blocks], self._scales[row, blocks])

    def decode_mean(self, numbers: Tensor) -> None:
        for blocks, mean in self.means():
            place = numbers[blocks.start * BLOCK_NUMEL :][: mean.numel()]
            place.copy_(mean.view(-1)[: place.numel()])

    def means(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the mean of all rows in fp32, some blocks at a time."""
        num_rows, num_blocks, _ = self._integers.shape
        for blocks in self._at_a_time(num_rows, num_blocks):
            yield blocks, _sum(self._integers[:, blocks], self._scales[:, blocks] / num_rows)

    def _divide(self, numel: int, row_numel: int) -> Iterator[_Slab]:
        """Divide the numbers into rows of one length and blocks of one size."""
        num_whole, num_in_last = divmod(numel, row_numel)
        for num_rows, first_row, length in ((num_whole, 0, row_numel), (1, num_whole, num_in_last)):
            if num_rows == 0 or length == 0:
                continue
            integers = self._integers[first_row : first_row + num_rows]
            scales = self._scales[first_row : first_row + num_rows]
            start = first_row * row_numel
            num_full, rest = divmod(length, BLOCK_NUMEL)
            for blocks in self._at_a_time(num_rows, num_full):
                shape = (num_rows, blocks.stop - blocks.start, BLOCK_NUMEL)
                offset = start + blocks.start * BLOCK_NUMEL
                yield _Slab(shape, row_numel, offset, integers[:, blocks], scales[:, blocks])
            if rest:
                last = slice(num_full, num_full + 1)
                offset = start + num_full * BLOCK_NUMEL
                yield _Slab((num_rows, 1, rest), row_numel, offset, integers[:, last, :rest], scales[:, last])

    def _at_a_time(self, num_rows: int, num_blocks: int) -> Iterator[slice]:
        step = max(self._max_blocks // num_rows, 1)
        return (slice(start, min(start + step, num_blocks)) for start in range(0, num_blocks, step))


@dataclass(frozen=True, slots=True)
class _Slab:
    """Some of the numbers, by row and block, with their integers and scales."""

    shape: tuple[int, int, int]
    row_numel: int
    offset: int
    integers: Tensor
    scales: Tensor

    def of(self, numbers: Tensor) -> Tensor:
        strides = (self.row_numel, BLOCK_NUMEL, 1)
        return numbers.as_strided(self.shape, strides, numbers.storage_offset() + self.offset)


def _encode(numbers: Tensor, integers: Tensor, scales: Tensor) -> None:
    # The largest number of each block without its sign; nan if there is one.
    if numbers.is_cpu:  # where this takes a sixth of the time
        largest = torch.maximum(numbers.amax(-1, keepdim=True), -numbers.amin(-1, keepdim=True)).float()
    else:
        largest = torch.linalg.vector_norm(numbers, math.inf, dim=-1, keepdim=True).float()
    torch.mul(largest.clamp_(min=_SMALLEST), _SCALE_OF_LARGEST, out=scales)
    integers.copy_(torch.mul(numbers, scales.reciprocal()).round_())


def _sum(integers: Tensor, scales: Tensor) -> Tensor:
    if not integers.is_cpu:
        return torch.mul(integers, scales).sum(0)
    total = torch.mul(integers[0], scales[0])  # a host does it row by row in half of the time
    for row in range(1, len(integers)):
        total.add_(torch.mul(integers[row], scales[row]))
    return total


class QuantizedMeanReduction(Reduction):
    """The mean over the ranks; gradients travel as `int8` and arrive in their own dtype."""

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives)
        self._exchanges: WeakKeyDictionary[DenseBucket, _Exchange] = WeakKeyDictionary()
        # What runs the second exchange.
        self._stream: torch.cuda.Stream | None = None
        self._worker: Worker | None = None
        if collectives.device.type == "cuda":
            self._stream = torch.cuda.Stream(collectives.device)  # type: ignore[no-untyped-call]
        elif collectives.world_size > 2:
            self._follow_ups = collectives.further_group("follow-up")
            self._worker = Worker("bucketddp-quantized")

    def start_dense(self, bucket: DenseBucket, *, index: int, is_last: bool) -> PendingReduction:
        numbers = bucket.numbers
        flags = bucket.wire[numbers.numel() :]
        pending_flags = self.collectives.start_mean(flags) if flags.numel() else None
        if not numbers.numel():
            return PendingReduction(flags.nbytes, None, pending_flags)
        exchange = self._exchanges.get(bucket)
        if exchange is None:
            if bucket.sharding is not None:
                exchange = _ForShards(self.collectives, numbers.numel(), bucket.sharding)
            else:
                kind = _ForAll if self.collectives.world_size > 2 else _ForTwo
                exchange = kind(self.collectives, numbers.numel())
            self._exchanges[bucket] = exchange
        first = exchange.start_first(numbers)
        transfer, finish = self._follow(first, exchange, numbers)
        return PendingReduction(flags.nbytes + exchange.bytes_sent, transfer, pending_flags, finish)

    def _follow(
        self, first: Pending, exchange: _Exchange, numbers: Tensor
    ) -> tuple[Pending, Callable[[], None] | None]:
        """Queue what follows the first exchange; return what to wait for, and what to call then."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                first.wait()
                if isinstance(exchange, _ForAll):
                    exchange.start_second(self.collectives).wait()
                exchange.finish(numbers)
                return self._stream.record_event(), None
        finish = partial(exchange.finish, numbers)
        if self._worker is None or not isinstance(exchange, _ForAll):
            return first, finish
        return _Following(self._worker.submit(partial(_start_second, exchange, first, self._follow_ups))), finish

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


def reduction_of(config: ReducerConfig, collectives: Collectives) -> Reduction:
    """Return the reduction that `config` asks for."""
    if config.comm_hook is not None:
        return CommHookReduction(collectives, config.comm_hook, config.comm_state)
    dtype = REDUCE_DTYPES.get(config.reduce_dtype or "")
    if dtype != torch.int8:
        return MeanReduction(collectives, dtype=dtype)
    return QuantizedMeanReduction(collectives) if collectives.world_size > 1 else MeanReduction(collectives)


def _start_second(exchange: _ForAll, first: Pending, follow_ups: Collectives) -> Pending:
    first.wait()
    return exchange.start_second(follow_ups)


@dataclass(frozen=True, slots=True)
class _Following:
    started: Future[Pending]

    def wait(self) -> None:
        self.started.result().wait()


class _ForAll:
    """Each rank computes the mean of one row, and sends it to all (Note: two exchanges)."""

    def __init__(self, collectives: Collectives, numel: int) -> None:
        self._collectives = collectives
        num_ranks = collectives.world_size
        row_numel = -(-numel // (num_ranks * BLOCK_NUMEL)) * BLOCK_NUMEL
        make_rows = partial(Blocks, num_rows=num_ranks, row_numel=row_numel, device=collectives.device)
        self._sent, self._received = make_rows(numel), make_rows(num_ranks * row_numel)
        self.bytes_sent = self._sent.bytes.nbytes

    def start_first(self, numbers: Tensor) -> Pending:
        self._sent.encode(numbers)
        return self._collectives.start_all_to_all(self._received.bytes, self._sent.bytes, owner=None)

    def start_second(self, collectives: Collectives) -> Pending:
        """Start to send the mean of the received rows to all ranks."""
        self._sent.encode_mean(self._received, row=collectives.rank)
        return collectives.start_gather_of_shards(self._sent.bytes, owner=None)

    def finish(self, numbers: Tensor) -> None:
        self._sent.decode(numbers)


class _ForTwo:
    """Two ranks exchange all blocks: the same bytes as in two exchanges of halves, rounded once."""

    def __init__(self, collectives: Collectives, numel: int) -> None:
        self._collectives = collectives
        num_ranks, device = collectives.world_size, collectives.device
        self._all = Blocks(num_ranks * numel, num_rows=num_ranks, row_numel=numel, device=device)
        own = self._all.bytes.view(num_ranks, -1)[collectives.rank]
        self._own = Blocks(numel, num_rows=1, row_numel=numel, device=device, memory=own)
        self.bytes_sent = self._own.bytes.nbytes

    def start_first(self, numbers: Tensor) -> Pending:
        self._own.encode(numbers)
        return self._collectives.start_gather_of_shards(self._all.bytes, owner=None)

    def finish(self, numbers: Tensor) -> None:
        self._all.decode_mean(numbers)


class _ForShards:
    """Each rank keeps the mean of its shard, which is rounded once."""

    def __init__(self, collectives: Collectives, numel: int, sharding: Sharding) -> None:
        self._collectives = collectives
        self._owner = sharding.owner
        self._shard = slice(*sharding.bounds(numel)[collectives.rank])
        num_ranks = collectives.world_size
        row_numel = numel // num_ranks if sharding.owner is None else numel
        self._receives = sharding.owner in (None, collectives.rank)
        sent, received = num_ranks if sharding.owner is None else 1, num_ranks if self._receives else 0
        self._sent = Blocks(numel, num_rows=sent, row_numel=row_numel, device=collectives.device)
        self._received = Blocks(received * row_numel, num_rows=received, row_numel=row_numel, device=collectives.device)
        self.bytes_sent = self._sent.bytes.nbytes // 2  # (Note: halves, in `cost`)

    def start_first(self, numbers: Tensor) -> Pending:
        self._sent.encode(numbers)
        return self._collectives.start_all_to_all(self._received.bytes, self._sent.bytes, owner=self._owner)

    def finish(self, numbers: Tensor) -> None:
        if self._receives:
            self._received.decode_mean(numbers[self._shard])


_Exchange = _ForAll | _ForTwo | _ForShards

# Of an H200, for a plan that is made where there is no GPU: benchmarks/results/wires_h200_202611.md.
GPU_CODECS: Codecs = {
    "bf16": Codec(6.7e-13, 8.8e-13),
    "fp16": Codec(6.7e-13, 8.8e-13),
    "int8": Codec(6.2e-12, 0.0, 1.3e-11),
}
_NUMEL = {"cpu": MIB, "cuda": 4 * MIB}
_NUM_IN_A_ROW, _NUM_MEASURED = 3, 5
# The number of rows makes no difference: together they have as many numbers as a bucket.
_NUM_RANKS = 2


def measure_codecs(device: torch.device) -> Codecs:
    """Return what each `reduce_dtype` takes to encode and to decode fp32 gradients on this device."""
    numbers = torch.ones(_NUMEL.get(device.type, MIB), device=device)
    halves = torch.empty_like(numbers, dtype=torch.bfloat16)
    numel, row_numel = len(numbers), len(numbers) // _NUM_RANKS
    sent, received = (Blocks(numel, num_rows=_NUM_RANKS, row_numel=row_numel, device=device) for _ in range(2))

    def s_per_byte(action: Callable[[], object]) -> float:
        """Measure several in a row, so that waiting for the device hardly counts."""

        def act() -> None:
            for _ in range(_NUM_IN_A_ROW):
                action()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        seconds = timeit.repeat(act, number=1, repeat=1 + _NUM_MEASURED)[1:]
        return statistics.median(seconds) / _NUM_IN_A_ROW / numbers.nbytes

    cast = Codec(s_per_byte(lambda: halves.copy_(numbers)), s_per_byte(lambda: numbers.copy_(halves)))
    encode = s_per_byte(lambda: sent.encode(numbers))
    mean = s_per_byte(lambda: sent.encode_mean(received, row=0))
    decode = s_per_byte(lambda: sent.decode(numbers))
    # On a GPU the mean is computed in a stream of its own, one bucket after the other; on a host by a thread, while the
    # next bucket travels.
    is_gpu = device.type == "cuda"
    int8 = Codec(encode, 0.0, mean + decode) if is_gpu else Codec(encode, mean + decode)
    return {"bf16": cast, "fp16": cast, "int8": int8}
