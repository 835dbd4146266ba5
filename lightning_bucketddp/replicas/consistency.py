"""When replicas are compared, what is compared, and what is done if they are not equal.

Note: a check in three steps
    Between two steps, checksums are started on the device. Between the next two, when they are on the host, one digest
    of them goes to all ranks with the message of the next backward. Then all ranks know whether anyone differs. Nothing
    waits for the device, and no rank sends anything that the others do not expect. If someone differs, the ranks stop
    and compare tensor by tensor.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import MessageKind, StepExchange
from lightning_bucketddp.config import ReplicaChecks
from lightning_bucketddp.replicas.checksums import (
    Checksums,
    Divergence,
    PendingChecksums,
    ReplicaDivergedError,
    find_divergence,
    units_of,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Parameters, buffers and what optimizers keep, by name."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any] = field(default_factory=dict)  # learning rates, step counters
    # Where a number can be written: a dict and the key in it.
    owners: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)

    def add(self, name: str, owner: dict[str, Any], key: str, *, is_number: bool) -> None:
        """Add `owner[key]`, if it is a tensor, or `is_number`."""
        value = owner[key]
        # An ordinary tensor: neither sparse nor made of others (a DTensor holds a shard).
        has_bits = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
        if has_bits and not hasattr(value, "__tensor_flatten__"):
            self.tensors[name] = value
        elif is_number:
            self.numbers[name] = value
            self.owners[name] = (owner, key)

    def start_digest(self, checksums: Checksums) -> PendingDigest:
        """Start to compute one number for everything; the state may change afterwards."""
        described = json.dumps([sorted(self.tensors), self.numbers], sort_keys=True)
        in_order = [self.tensors[name] for name in sorted(self.tensors)]
        return PendingDigest(described, checksums.start(units_of(in_order)))

    def values(self, checksums: Checksums) -> dict[str, Any]:
        """Return the numbers, which are more often a cause than an effect, and the checksum of each tensor."""
        of_tensors = checksums.start([[tensor] for tensor in self.tensors.values()]).wait()
        return {**self.numbers, **dict(zip(self.tensors, of_tensors, strict=True))}


@dataclass(frozen=True, slots=True)
class PendingDigest:
    """A digest whose checksums a device still works on."""

    described: str
    checksums: PendingChecksums

    def wait(self) -> int:
        """Return the digest: a number below 2**48, which a float holds exactly."""
        text = json.dumps([self.described, self.checksums.wait()])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def _is_setting(value: Any) -> bool:
    """Return whether it is a number, or several (`betas`)."""
    return isinstance(value, int | float) or (isinstance(value, list | tuple) and all(map(_is_setting, value)))


def training_state(
    parameters: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
    *,
    is_divided: Callable[[Tensor], bool] = lambda _: False,
) -> TrainingState:
    """Return what is compared: `parameters` and what `optimizers` keep for them, unless that is divided among ranks."""
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


class ReplicaComparison:
    """Compares the replicas of a training (Note: a check in three steps).

    If it `has_messages`, every synchronised backward sends one with `exchange`; else it is sent with a digest only.
    """

    def __init__(
        self, collectives: Collectives, config: ReplicaChecks, *, exchange: StepExchange, has_messages: bool
    ) -> None:
        self._collectives = collectives
        self._config = config
        self.are_periodic = bool(config.every_n_steps)
        self._exchange = exchange
        self._has_messages = has_messages
        self._checksums = Checksums()
        self._pending: PendingDigest | None = None
        self._begun_at = 0

    def between_steps(self, state: Callable[[], TrainingState], *, num_backwards: int) -> None:
        """Compare replicas when it is time to. All ranks call this after the same number of synchronised backwards."""
        if not self._config.every_n_steps:
            return
        if not self._has_messages:
            self._exchange.receive()
        if self._exchange.digests_differ:
            self._exchange.digests_differ = False
            self._pending = None  # begun before that is known
            if not self.compare(state, when=f"after {num_backwards} synchronised backwards"):
                self._warn("The replicas differed in the last check and are equal again.")
        if self._pending is not None and num_backwards > self._begun_at:
            self._exchange.digest = self._pending.wait()
            self._pending = None
            if not self._has_messages:
                self._exchange.send(MessageKind.STEP)
        if self._pending is None and num_backwards - self._begun_at >= self._config.every_n_steps:
            self._pending = state().start_digest(self._checksums)
            self._begun_at = num_backwards

    def compare(self, state: Callable[[], TrainingState], *, when: str) -> bool:
        """Compare now and act on it; return whether there was a difference. All ranks must call this."""
        compared = state()
        hosts = self._collectives.host_group()
        digest = torch.tensor([compared.start_digest(self._checksums).wait()])
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
        if self._config.on_divergence == "log":
            self._warn(found)
        elif self._config.on_divergence == "heal" and is_healable:
            self._heal(compared, divergence, from_source=by_rank[divergence.source])
            self._warn(f"{found} All ranks go on with the state of rank {divergence.source}.")
        else:
            raise ReplicaDivergedError(f"{found} {remedy}")
        return True

    def _warn(self, text: str) -> None:
        if self._collectives.rank == 0:
            log.warning("bucketddp: %s", text)

    def _heal(self, state: TrainingState, divergence: Divergence, *, from_source: Mapping[str, Any]) -> None:
        names = [difference.name for difference in divergence.differences]
        for owned in names:
            if owned in state.owners:
                (owner, key), value = state.owners[owned], from_source[owned]
                owner[key] = tuple(value) if isinstance(owner[key], tuple) else value
        tensors = [state.tensors[name] for name in names if name in state.tensors]
        device = self._collectives.device
        on_device = [tensor for tensor in tensors if tensor.device == device]
        # Such as step counters, and everything once the training has ended.
        on_host = [tensor for tensor in tensors if tensor.device != device]
        source = self._collectives.global_ranks.index(divergence.source)
        self._collectives.broadcast_tensors(on_device, source=source)
        self._collectives.host_group().broadcast_tensors(on_host, source=source)
