"""Checksums of tensors, computed where the tensors are.

Note: checksum
    The bits of a tensor, in the order in which they lie in memory, are taken as 64-bit words. Each word is multiplied
    by an odd number and the products are added modulo 2**64. An odd factor loses nothing, so a change of one word, be
    it a single bit, always shows. The factors are random, so swapped words and changes of opposite sign show too, which
    a plain sum would miss. They repeat after a prime number of words: a tensor is folded to that length first, which
    reads it once and needs no memory of its size, and no shape has rows of just that length.

Note: without waiting
    Checksums are copied to the host behind whatever the device has to do before. Whoever asks for them a step later
    waits for work that is a step old: the device has the newer step to go on with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_WORD_BYTES = 8
_NUM_FACTORS = 65_521
# Starting a checksum of its own costs more than copying so much.
_SMALL_BYTES = 2**18
_SEED = 20_261


@dataclass(frozen=True, slots=True)
class _Copy:
    """The checksums of one device on their way to the host."""

    positions: list[int]
    values: Tensor
    arrived: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class PendingChecksums:
    """Checksums that a device still works on."""

    copies: list[_Copy]

    def wait(self) -> list[int]:
        """Return the checksums, in the order of the units. Blocks the host until the devices have computed them."""
        by_position: dict[int, int] = {}
        for copy in self.copies:
            if copy.arrived is not None:
                copy.arrived.synchronize()
            by_position.update(zip(copy.positions, copy.values.tolist(), strict=True))
        return [by_position[position] for position in range(len(by_position))]


def units_of(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return `tensors` in units, each of which gets one checksum: large ones alone, small ones of a device together."""
    alone: list[list[Tensor]] = []
    together: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes > _SMALL_BYTES:
            alone.append([tensor])
        else:
            together.setdefault(tensor.device, []).append(tensor)
    return [*alone, *together.values()]


class Checksums:
    """Computes checksums (Note: checksum), on any device, of any dtype."""

    def __init__(self) -> None:
        self._factors: dict[torch.device, Tensor] = {}

    def start(self, units: Sequence[Sequence[Tensor]]) -> PendingChecksums:
        """Start on one number per unit of tensors on one device, equal for equal bits (Note: without waiting)."""
        by_device: dict[torch.device, dict[int, Tensor]] = {}
        with torch.no_grad():
            for position, unit in enumerate(units):
                by_device.setdefault(unit[0].device, {})[position] = self._checksum(unit)
            return PendingChecksums([_to_host(values) for values in by_device.values()])

    def _checksum(self, unit: Sequence[Tensor]) -> Tensor:
        factors = self._factors_on(unit[0].device)
        raw = _bytes(unit[0]) if len(unit) == 1 else torch.cat([_bytes(tensor) for tensor in unit])
        if raw.storage_offset() % _WORD_BYTES:
            raw = raw.clone()
        num_words = raw.numel() // _WORD_BYTES
        words, rest = raw[: num_words * _WORD_BYTES].view(torch.int64), raw[num_words * _WORD_BYTES :]
        value = (_folded(words) * factors[: min(num_words, _NUM_FACTORS)]).sum()
        return value + (rest * factors[-_WORD_BYTES:][: rest.numel()]).sum() if rest.numel() else value

    def _factors_on(self, device: torch.device) -> Tensor:
        if device not in self._factors:
            generator = torch.Generator().manual_seed(_SEED)
            numbers = torch.randint(-(2**62), 2**62, (_NUM_FACTORS,), generator=generator)
            self._factors[device] = (2 * numbers + 1).to(device)
        return self._factors[device]


def _folded(words: Tensor) -> Tensor:
    """Return `words`, or the sums of those that a multiple of `_NUM_FACTORS` separates."""
    num_rows, num_left = divmod(words.numel(), _NUM_FACTORS)
    if num_rows == 0:
        return words
    sums = words[: num_rows * _NUM_FACTORS].view(num_rows, _NUM_FACTORS).sum(dim=0)
    sums[:num_left] += words[num_rows * _NUM_FACTORS :]
    return sums


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of `tensor` in the order in which they lie in memory; copied only where they have gaps."""
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    span = 1 + sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    if span != tensor.numel():
        tensor = tensor.contiguous()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _to_host(values: dict[int, Tensor]) -> _Copy:
    on_device = torch.stack(list(values.values()))
    on_host = on_device.to("cpu", non_blocking=True)
    arrived = None
    if on_device.device.type == "cuda":
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(on_device.device))
    return _Copy(list(values), on_host, arrived)
