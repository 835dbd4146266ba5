"""When replicas are compared, what is compared, and what is done if they are not equal.

Between two steps, checksums are started on the device. Between the next two, when they are on the host, one digest of
them goes to all ranks with the message of the next backward. Then all ranks know whether any differs. Nothing waits
for the device, and no rank sends anything that the others do not expect. If one differs, the ranks stop and compare
tensor by tensor.

Note: checksum
    The bits of a tensor, in memory order, are read as 64-bit words. Each word is multiplied by an odd number and the
    products are added modulo 2**64. An odd factor loses nothing, so a change of one word, be it a single bit, always
    changes the sum. The factors are random, so swapped words and changes of opposite sign change it too. They repeat
    after a prime number of words: a tensor is folded to that length first, which reads it once and needs no memory of
    its size, and no shape has rows of just that length.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import MessageKind, StepExchange, id_of
from lightning_bucketddp.config import ReplicaChecks
from lightning_bucketddp.wording import list_ranks, wrap

_WORD_BYTES = 8
_NUM_FACTORS = 65_521
# Starting a checksum of its own costs more than copying so much.
_SMALL_BYTES = 2**18
_SEED = 20_261


def units_of(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return `tensors` in units, each of which gets one checksum: large ones alone, small ones of a device together."""
    large: list[list[Tensor]] = []
    small: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes > _SMALL_BYTES:
            large.append([tensor])
        else:
            small.setdefault(tensor.device, []).append(tensor)
    return [*large, *small.values()]


class Checksums:
    """Computes checksums (Note: checksum), on any device, of any dtype."""

    def __init__(self) -> None:
        self._factors: dict[torch.device, Tensor] = {}

    def start(self, units: Sequence[Sequence[Tensor]]) -> Callable[[], list[int]]:
        """Start to compute one number per unit of tensors on one device; return a function that waits for them.

        Equal bits have equal numbers. They are copied to the host in stream order: a step later they have arrived.
        """
        by_device: dict[torch.device, dict[int, Tensor]] = {}
        positions: list[int] = []
        on_host: list[Tensor] = []
        arrived: list[torch.cuda.Event] = []
        with torch.no_grad():
            for position, unit in enumerate(units):
                by_device.setdefault(unit[0].device, {})[position] = self._checksum(unit)
            for device, values in by_device.items():
                positions.extend(values)
                on_host.append(torch.stack(list(values.values())).to("cpu", non_blocking=True))
                if device.type == "cuda":
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record(torch.cuda.current_stream(device))
                    arrived.append(event)

        def wait() -> list[int]:
            for event in arrived:
                event.synchronize()
            numbers = [number for of_device in on_host for number in of_device.tolist()]
            return [number for _, number in sorted(zip(positions, numbers, strict=True))]

        return wait

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
    """Return the sums of the words whose positions differ by multiples of `_NUM_FACTORS`."""
    num_rows, num_left = divmod(words.numel(), _NUM_FACTORS)
    if num_rows == 0:
        return words
    sums = words[: num_rows * _NUM_FACTORS].view(num_rows, _NUM_FACTORS).sum(dim=0)
    sums[:num_left] += words[num_rows * _NUM_FACTORS :]
    return sums


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of `tensor` in memory order; copied only where they have gaps."""
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
    """A tensor or number that is not the same on all ranks."""

    name: str
    # Groups of ranks with equal values, the largest first; of equally large ones the one with the lowest rank.
    groups: list[list[int]]
    values: list[Any]  # of each group; None: it does not exist there
    is_number: bool  # otherwise the values are checksums

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
    """Everything that is not the same on all ranks, and the rank with the state to keep."""

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


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Parameters, buffers and the state of optimizers, by name."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any] = field(default_factory=dict)  # learning rates, step counters
    # Where a number can be written: a dict and the key in it.
    owners: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)

    def add(self, name: str, owner: dict[str, Any], key: str, *, is_number: bool) -> None:
        """Add `owner[key]` if it is an ordinary tensor, or `is_number`."""
        value = owner[key]
        # Neither sparse nor made of others (a DTensor holds a shard).
        has_bits = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
        if has_bits and not hasattr(value, "__tensor_flatten__"):
            self.tensors[name] = value
        elif is_number:
            self.numbers[name] = value
            self.owners[name] = (owner, key)

    def start_digest(self, checksums: Checksums) -> Callable[[], int]:
        """Start to compute one `id_of` everything, which may change afterwards; return a function that waits for it."""
        described = json.dumps([sorted(self.tensors), self.numbers], sort_keys=True)
        wait = checksums.start(units_of([self.tensors[name] for name in sorted(self.tensors)]))
        return lambda: id_of(json.dumps([described, wait()]).encode())

    def values(self, checksums: Checksums) -> dict[str, Any]:
        """Return the numbers and the checksum of each tensor. Numbers come first: they are rather cause than effect."""
        of_tensors = checksums.start([[tensor] for tensor in self.tensors.values()])()
        return {**self.numbers, **dict(zip(self.tensors, of_tensors, strict=True))}


def _is_setting(value: Any) -> bool:
    """Return whether a value of a parameter group is a number, or several (`betas`)."""
    return isinstance(value, int | float) or (isinstance(value, list | tuple) and all(map(_is_setting, value)))


def training_state(
    parameters: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
    *,
    is_divided: Callable[[Tensor], bool] = lambda _: False,
) -> TrainingState:
    """Return what is compared: `parameters` and their state in `optimizers`, unless that is divided among ranks."""
    compared = TrainingState({name: param.detach() for name, param in parameters.items()})
    names = {id(param): name for name, param in parameters.items()}
    for number, optimizer in enumerate(optimizers):
        # Each rank has another shard of a sharded state (`ZeroRedundancyOptimizer`). Lightning asks for the same name.
        if hasattr(optimizer, "consolidate_state_dict"):
            continue
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) in names:
                    compared.numbers[f"optimizer {number}: group of {names[id(param)]}"] = index
            for key, value in group.items():
                compared.add(f"optimizer {number}: {key} of group {index}", group, key, is_number=_is_setting(value))
        for param, state in optimizer.state.items():
            if id(param) in names and isinstance(state, dict) and not is_divided(param):
                for key, value in state.items():
                    # A float there may be a rank's own loss (LBFGS). If it matters, the weights will show it.
                    name = f"optimizer {number}: {key} of {names[id(param)]}"
                    compared.add(name, state, key, is_number=isinstance(value, int))
    return compared


@dataclass(eq=False)
class ReplicaComparison:
    """Compares the replicas of a training.

    If it `has_messages`, every synchronised backward sends one by `exchange`; else only digests are sent.
    """

    collectives: Collectives
    config: ReplicaChecks
    exchange: StepExchange
    has_messages: bool
    _checksums: Checksums = field(default_factory=Checksums)
    _digest: Callable[[], int] | None = None  # waits for the digest that is being computed
    _begun_at: int = 0

    def between_steps(self, state: Callable[[], TrainingState], *, num_backwards: int) -> None:
        """Compare replicas if that is due. All ranks call this after the same number of synchronised backwards."""
        if not self.config.every_n_steps:
            return
        if not self.has_messages:
            self.exchange.receive()
        if self.exchange.digests_differ:
            self.exchange.digests_differ = False
            self._digest = None  # of a state that is compared now
            if not self.compare(state, when=f"after {num_backwards} synchronised backwards"):
                self._warn("The replicas differed in the last check and are equal again.")
        if self._digest is not None and num_backwards > self._begun_at:
            self.exchange.digest = self._digest()
            self._digest = None
            if not self.has_messages:
                self.exchange.send(MessageKind.STEP)
        if self._digest is None and num_backwards - self._begun_at >= self.config.every_n_steps:
            self._digest = state().start_digest(self._checksums)
            self._begun_at = num_backwards

    def compare(self, state: Callable[[], TrainingState], *, when: str) -> bool:
        """Compare now, and raise, heal or log; return whether there was a difference. All ranks must call this."""
        compared = state()
        hosts = self.collectives.host_group()
        digest = torch.tensor([compared.start_digest(self._checksums)()])
        if len(set(torch.cat(hosts.gather(digest)).tolist())) == 1:
            return False
        gathered = hosts.gather_json(compared.values(self._checksums))
        by_rank = dict(zip(hosts.global_ranks, gathered, strict=True))
        divergence = find_divergence(by_rank, numbers=set(compared.numbers))
        assert divergence is not None  # equal values have equal digests
        found = f"The replicas are not equal {when}: {divergence}"
        is_healable = all(
            difference.exists_everywhere and (difference.name in compared.tensors or difference.name in compared.owners)
            for difference in divergence.differences
        )
        remedy = (
            "Resume from a checkpoint from before, or pass `replica_checks=ReplicaChecks(on_divergence='heal')` to the"
            " strategy: all ranks then go on with the state that most of them hold."
            if is_healable
            else "The ranks do not train the same things, so none can follow another: make their optimizers the same."
        )
        if self.config.on_divergence == "log":
            self._warn(found)
        elif self.config.on_divergence == "heal" and is_healable:
            self._heal(compared, divergence, from_source=by_rank[divergence.source])
            self._warn(f"{found} All ranks go on with the state of rank {divergence.source}.")
        else:
            raise ReplicaDivergedError(f"{found} {remedy}")
        return True

    def _warn(self, text: str) -> None:
        if self.collectives.rank == 0:
            log.warning(wrap(f"bucketddp: {text}"))

    def _heal(self, state: TrainingState, divergence: Divergence, *, from_source: Mapping[str, Any]) -> None:
        """Overwrite what differs by the values of the source."""
        names = [difference.name for difference in divergence.differences]
        for name in state.owners.keys() & set(names):
            owner, key = state.owners[name]
            owner[key] = tuple(from_source[name]) if isinstance(owner[key], tuple) else from_source[name]
        tensors = [state.tensors[name] for name in names if name in state.tensors]
        on_device = [tensor for tensor in tensors if tensor.device == self.collectives.device]
        # Step counters, and everything once the training has ended.
        on_host = [tensor for tensor in tensors if tensor.device != self.collectives.device]
        source = self.collectives.global_ranks.index(divergence.source)
        self.collectives.broadcast_tensors(on_device, source=source)
        self.collectives.host_group().broadcast_tensors(on_host, source=source)
