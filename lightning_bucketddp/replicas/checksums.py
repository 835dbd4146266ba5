"""Checksums of tensors, computed where the tensors are; and what differs where replicas are no longer equal.

Note: checksum
    The bits of a tensor, in the order in which they lie in memory, are taken as 64-bit words. Each word is multiplied
    by an odd number and the products are added modulo 2**64. An odd factor loses nothing, so a change of one word, be
    it a single bit, always shows. The factors are random, so swapped words and changes of opposite sign show too. They
    repeat after a prime number of words: a tensor is folded to that length first, which reads it once and needs no
    memory of its size, and no shape has rows of just that length.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_bucketddp.wording import list_ranks

_WORD_BYTES = 8
_NUM_FACTORS = 65_521
# Starting a checksum of its own costs more than copying so much.
_SMALL_BYTES = 2**18
_SEED = 20_261


@dataclass(frozen=True, slots=True)
class PendingChecksums:
    """Checksums on their way to the host, of one device after the other; `positions` are those of the units."""

    positions: list[int] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    arrived: list[torch.cuda.Event] = field(default_factory=list)

    def wait(self) -> list[int]:
        """Return the checksums, in the order of the units. Blocks the host until the devices have computed them."""
        for event in self.arrived:
            event.synchronize()
        values = [value for of_device in self.values for value in of_device.tolist()]
        return [value for _, value in sorted(zip(self.positions, values, strict=True))]


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
        """Start on one number per unit of tensors on one device, equal for equal bits.

        They are copied to the host behind what the device has to do before: who asks a step later hardly waits.
        """
        by_device: dict[torch.device, dict[int, Tensor]] = {}
        pending = PendingChecksums()
        with torch.no_grad():
            for position, unit in enumerate(units):
                by_device.setdefault(unit[0].device, {})[position] = self._checksum(unit)
            for device, values in by_device.items():
                pending.positions.extend(values)
                pending.values.append(torch.stack(list(values.values())).to("cpu", non_blocking=True))
                if device.type == "cuda":
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record(torch.cuda.current_stream(device))
                    pending.arrived.append(event)
        return pending

    def _checksum(self, unit: Sequence[Tensor]) -> Tensor:
        device = unit[0].device
        if device not in self._factors:
            generator = torch.Generator().manual_seed(_SEED)
            numbers = torch.randint(-(2**62), 2**62, (_NUM_FACTORS,), generator=generator)
            self._factors[device] = (2 * numbers + 1).to(device)
        factors = self._factors[device]
        raw = _bytes(unit[0]) if len(unit) == 1 else torch.cat([_bytes(tensor) for tensor in unit])
        if raw.storage_offset() % _WORD_BYTES:
            raw = raw.clone()
        num_words = raw.numel() // _WORD_BYTES
        words, rest = raw[: num_words * _WORD_BYTES].view(torch.int64), raw[num_words * _WORD_BYTES :]
        value = (_folded(words) * factors[: min(num_words, _NUM_FACTORS)]).sum()
        return value + (rest * factors[-_WORD_BYTES:][: rest.numel()]).sum() if rest.numel() else value


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


_MAX_SHOWN = 3
_CAUSES = (
    "Hardware that flips bits, or code that does not do the same on every rank (a condition on the rank, its own random"
    " numbers, a learning rate that follows a metric of its own), makes replicas drift."
)


class ReplicaDivergedError(RuntimeError):
    """The ranks no longer hold the same weights or optimizer state."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor or number that is not the same everywhere."""

    name: str
    # Ranks with equal values, the largest group first; of equally large ones the one with the lowest rank.
    groups: list[list[int]]
    values: list[Any]  # of each group; None where it does not exist
    is_number: bool  # or else the values are checksums

    @property
    def exists_everywhere(self) -> bool:
        return None not in self.values

    @property
    def outvoted(self) -> list[int]:
        """Return the ranks that are not in the first group."""
        return sorted(rank for group in self.groups[1:] for rank in group)

    def __str__(self) -> str:
        if not self.exists_everywhere:
            missing = self.groups[self.values.index(None)]
            having = sorted(rank for group in self.groups if group is not missing for rank in group)
            return f"`{self.name}` exists on {list_ranks(having)} but not on {list_ranks(missing)}"
        if self.is_number:
            shown = [f"{value} on {list_ranks(group)}" for value, group in zip(self.values, self.groups, strict=True)]
            return f"`{self.name}` is {' but '.join(shown)}"
        if len(self.groups[0]) > len(self.outvoted):
            return f"`{self.name}` on {list_ranks(self.outvoted)} differs from that on the other ranks"
        return f"`{self.name}` differs between {' and '.join(list_ranks(group) for group in self.groups)}"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Everything that is not the same everywhere, and the rank to follow."""

    differences: list[Difference]
    source: int

    def __str__(self) -> str:
        shown = "; ".join(map(str, self.differences[:_MAX_SHOWN]))
        more = len(self.differences) - _MAX_SHOWN
        return f"{shown}{f'; and {more} more' if more > 0 else ''}. {_CAUSES}"


def find_divergence(by_rank: Mapping[int, Mapping[str, Any]], *, numbers: set[str]) -> Divergence | None:
    """Return what differs between the ranks' values; None if nothing does.

    Most ranks are right; where no group is larger than another, the one with the lowest rank is.
    """
    differences = []
    for name in dict.fromkeys(name for values in by_rank.values() for name in values):
        groups: dict[str, list[int]] = {}
        for rank, values in by_rank.items():
            groups.setdefault(json.dumps(values.get(name)), []).append(rank)
        if len(groups) > 1:
            largest_first = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
            values_of_groups = [json.loads(value) for value, _ in largest_first]
            ranks = [group for _, group in largest_first]
            differences.append(Difference(name, ranks, values_of_groups, name in numbers))
    if not differences:
        return None
    num_outvoted = Counter(rank for difference in differences for rank in difference.outvoted)
    return Divergence(differences, source=min(by_rank, key=lambda rank: (num_outvoted[rank], rank)))
