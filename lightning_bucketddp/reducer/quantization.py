"""Numbers as bytes: blocks of 256 integers of 8 bits, each block with a scale of its own.

Note: blocks
    The largest number of a block, without its sign, becomes 127, and all others are rounded to the nearest multiple of
    a 127th of it. So each is wrong by at most a 254th of the largest in its block. One that is not finite makes the
    scale of its block infinite or nan, and so all of the block: none of them becomes a number.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    """Rows of equally many numbers, as bytes: of each row first the integers of all blocks, then their scales.

    Args:
        num_rows: how many rows.
        row_numel: how many numbers are in each; the last block of a row is filled up.
    """

    def __init__(self, num_rows: int, row_numel: int, *, device: torch.device) -> None:
        num_blocks = -(-row_numel // BLOCK_NUMEL)
        self._row_numel = row_numel
        # Zeros: what fills up a block must never hold anything else.
        row_bytes = num_blocks * (BLOCK_NUMEL + _SCALE_BYTES)
        self.bytes = torch.zeros(num_rows * row_bytes, dtype=torch.uint8, device=device)
        integers, scales = self.bytes.view(num_rows, row_bytes).tensor_split([num_blocks * BLOCK_NUMEL], dim=1)
        self._integers = integers.view(torch.int8).view(num_rows, num_blocks, BLOCK_NUMEL)
        self._scales = scales.view(torch.float32).unsqueeze(-1)
        self._max_blocks = _NUMEL_AT_A_TIME["cpu" if device.type == "cpu" else "accelerator"] // BLOCK_NUMEL

    def encode(self, numbers: Tensor) -> None:
        """Take over `numbers`, row by row; there may be fewer than the rows have room for."""
        for part, integers, scales in self._parts(numbers):
            _encode(part, integers, scales)

    def decode(self, numbers: Tensor) -> None:
        """Overwrite `numbers`, row by row."""
        for part, integers, scales in self._parts(numbers):
            torch.mul(integers[..., : part.shape[-1]], scales, out=part)

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
            shares = self._scales[:, blocks] / num_rows
            yield blocks, torch.mul(self._integers[:, blocks], shares).sum(0)

    def _parts(self, numbers: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Return some numbers at a time, block by block, with their integers and scales."""
        num_whole = numbers.numel() // self._row_numel
        whole, rest = numbers.tensor_split([num_whole * self._row_numel])
        for rows, first_row in ((whole.view(num_whole, self._row_numel), 0), (rest.view(1, -1), num_whole)):
            num_rows, row_numel = rows.shape
            if not rows.numel():
                continue
            integers = self._integers[first_row : first_row + num_rows]
            scales = self._scales[first_row : first_row + num_rows]
            num_full = row_numel // BLOCK_NUMEL
            full, last = rows.tensor_split([num_full * BLOCK_NUMEL], dim=1)
            full = full.view(num_rows, num_full, BLOCK_NUMEL)
            for blocks in self._at_a_time(num_rows, num_full):
                yield full[:, blocks], integers[:, blocks], scales[:, blocks]
            if last.numel():
                yield last.unsqueeze(1), integers[:, num_full : num_full + 1], scales[:, num_full : num_full + 1]

    def _at_a_time(self, num_rows: int, num_blocks: int) -> Iterator[slice]:
        step = max(self._max_blocks // num_rows, 1)
        return (slice(start, min(start + step, num_blocks)) for start in range(0, num_blocks, step))


def _encode(numbers: Tensor, integers: Tensor, scales: Tensor) -> None:
    largest = torch.maximum(numbers.amax(-1, keepdim=True), -numbers.amin(-1, keepdim=True)).float()
    torch.mul(largest.clamp_(min=_SMALLEST), _SCALE_OF_LARGEST, out=scales)
    integers[..., : numbers.shape[-1]].copy_(torch.mul(numbers, scales.reciprocal()).round_())
