"""The state that must be equal on all ranks while they train: tensors and numbers, each with a name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bucketddp.replicas.checksums import Checksums, PendingChecksums, units_of


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Parameters, buffers and what optimizers keep.

    Attributes:
        tensors: by name.
        numbers: what is not a tensor (learning rates, step counters), by name.
        owners: where a number can be written: a dict and the key in it.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, Any] = field(default_factory=dict)
    owners: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)

    def add_optimizer(self, name: str, optimizer: Optimizer, *, parameters: Mapping[str, Tensor]) -> None:
        """Add what `optimizer` keeps for these parameters, and the numbers of its parameter groups."""
        names = {id(param): param_name for param_name, param in parameters.items()}
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) in names:
                    self.numbers[f"{name}: group of {names[id(param)]}"] = index
            for key, value in group.items():
                self._add(f"{name}: {key} of group {index}", value, owner=group, key=key, is_number=_is_setting(value))
        for param, state in optimizer.state.items():
            if id(param) in names and isinstance(state, dict):
                for key, value in state.items():
                    # A float there may be a rank's own loss (LBFGS). If it matters, the weights will show it.
                    is_counter = isinstance(value, int)
                    self._add(f"{name}: {key} of {names[id(param)]}", value, owner=state, key=key, is_number=is_counter)

    def _add(self, name: str, value: Any, *, owner: dict[str, Any], key: str, is_number: bool) -> None:
        if isinstance(value, Tensor) and _has_bits(value):
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

    def set_number(self, name: str, value: Any) -> None:
        """Write a number where it belongs."""
        owner, key = self.owners[name]
        owner[key] = tuple(value) if isinstance(owner[key], tuple) else value


@dataclass(frozen=True, slots=True)
class PendingDigest:
    """A digest whose checksums a device still works on."""

    described: str
    checksums: PendingChecksums

    def wait(self) -> int:
        """Return the digest: a number below 2**48, which a float holds exactly."""
        text = json.dumps([self.described, self.checksums.wait()])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def _has_bits(tensor: Tensor) -> bool:
    """Return whether it is an ordinary tensor: neither sparse nor made of others (a DTensor holds a shard)."""
    return tensor.layout == torch.strided and not tensor.is_meta and not hasattr(tensor, "__tensor_flatten__")


def _is_setting(value: Any) -> bool:
    """Return whether it is a number, or several (`betas`)."""
    return isinstance(value, int | float) or (isinstance(value, list | tuple) and all(map(_is_setting, value)))
