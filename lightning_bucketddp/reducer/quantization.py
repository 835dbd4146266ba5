"""Numbers as bytes: blocks of 256 integers of 8 bits, each block with a scale of its own.

Note: blocks
    The largest number of a block, without its sign, becomes 127, and all others are rounded to the nearest multiple of
    a 127th of it. So each is wrong by at most a 254th of the largest in its block. One that is not finite makes the
    scale of its block infinite or nan, and so all of the block: none of them becomes a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bucketddp.config import BLOCK_NUMEL

# A little less than a 127th: the largest number that a dtype has must not become infinite.
_SCALE_OF_LARGEST = (1 - 2**-22) / 127
# A block whose largest number is smaller is zero: its scale would have no inverse.
_SMALLEST = 1e-30
_SCALE_BYTES = 4
# How many numbers are in work at a time, which bounds the memory for it.
_NUMEL_AT_A_TIME = {"cpu": 2**20, "accelerator": 2**24}


class Blocks:
    """Numbers in rows of equally many, as bytes: of each row first the integers of all blocks, then their scales.

    Args:
        numel: how many numbers there are; the last rows may have room for more.
        num_rows: how many rows there are.
        row_numel: how many numbers go into each; its last block is filled up.
        memory: where the bytes lie, all zero; None: in memory of their own.
    """

    def __init__(
        self, numel: int, *, num_rows: int, row_numel: int, device: torch.device, memory: Tensor | None = None
    ) -> None:
        num_blocks = -(-row_numel // BLOCK_NUMEL)
        row_bytes = num_blocks * (BLOCK_NUMEL + _SCALE_BYTES)
        # Zeros: what fills up a block must never hold anything else.
        if memory is None:
            memory = torch.zeros(num_rows * row_bytes, dtype=torch.uint8, device=device)
        self.bytes = memory
        integers, scales = self.bytes.view(num_rows, row_bytes).tensor_split([num_blocks * BLOCK_NUMEL], dim=1)
        self._integers = integers.view(torch.int8).view(num_rows, num_blocks, BLOCK_NUMEL)
        self._scales = scales.view(torch.float32).unsqueeze(-1)
        self._max_blocks = _NUMEL_AT_A_TIME["cpu" if device.type == "cpu" else "accelerator"] // BLOCK_NUMEL
        self._parts = list(self._divide(numel, row_numel))

    def encode(self, numbers: Tensor) -> None:
        """Take over `numbers`, row by row."""
        for part in self._parts:
            _encode(part.of(numbers), part.integers, part.scales)

    def decode(self, numbers: Tensor) -> None:
        """Overwrite `numbers`, row by row."""
        for part in self._parts:
            torch.mul(part.integers, part.scales, out=part.of(numbers))

    def encode_mean(self, of: Blocks, *, row: int) -> None:
        """Take over the mean of the rows of others, as one row."""
        for blocks, mean in of.means():
            _encode(mean, self._integers[row, blocks], self._scales[row, blocks])

    def decode_mean(self, numbers: Tensor) -> None:
        """Overwrite `numbers` with the mean of all rows."""
        for blocks, mean in self.means():
            part = numbers[blocks.start * BLOCK_NUMEL :][: mean.numel()]
            part.copy_(mean.view(-1)[: part.numel()])

    def means(self) -> Iterator[tuple[slice, Tensor]]:
        """Return the mean of all rows in fp32, some blocks at a time."""
        num_rows, num_blocks, _ = self._integers.shape
        for blocks in self._at_a_time(num_rows, num_blocks):
            yield blocks, _sum(self._integers[:, blocks], self._scales[:, blocks] / num_rows)

    def _divide(self, numel: int, row_numel: int) -> Iterator[_Part]:
        """Divide the numbers into parts, of rows of one length and of blocks of one size."""
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
                yield _Part(shape, row_numel, offset, integers[:, blocks], scales[:, blocks])
            if rest:
                last = slice(num_full, num_full + 1)
                offset = start + num_full * BLOCK_NUMEL
                yield _Part((num_rows, 1, rest), row_numel, offset, integers[:, last, :rest], scales[:, last])

    def _at_a_time(self, num_rows: int, num_blocks: int) -> Iterator[slice]:
        step = max(self._max_blocks // num_rows, 1)
        return (slice(start, min(start + step, num_blocks)) for start in range(0, num_blocks, step))


@dataclass(frozen=True, slots=True)
class _Part:
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
    torch.mul(_largest(numbers).clamp_(min=_SMALLEST), _SCALE_OF_LARGEST, out=scales)
    integers.copy_(torch.mul(numbers, scales.reciprocal()).round_())


def _sum(integers: Tensor, scales: Tensor) -> Tensor:
    """Return the sum of all rows."""
    if not integers.is_cpu:
        return torch.mul(integers, scales).sum(0)
    total = torch.mul(integers[0], scales[0])  # a host does it row by row in half of the time
    for row in range(1, len(integers)):
        total.add_(torch.mul(integers[row], scales[row]))
    return total


def _largest(numbers: Tensor) -> Tensor:
    """Return the largest number of each block without its sign, in fp32; nan if there is one."""
    if numbers.is_cpu:  # where this takes a sixth of the time
        return torch.maximum(numbers.amax(-1, keepdim=True), -numbers.amin(-1, keepdim=True)).float()
    largest: Tensor = torch.linalg.vector_norm(numbers, math.inf, dim=-1, keepdim=True)
    return largest.float()
