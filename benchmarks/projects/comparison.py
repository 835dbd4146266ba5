"""Compare what two trainings of a project ended with, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

NUM_RANKS = 2


@dataclass(frozen=True)
class Training:
    """What one training ended with.

    Attributes:
        tensors: weights, buffers and optimizer state by name, for each rank.
        num_steps: of all optimizers of a rank.
        in_torch_ddp: whether torch's DistributedDataParallel was there.
    """

    tensors: list[dict[str, torch.Tensor]]
    num_steps: int
    in_torch_ddp: bool

    @classmethod
    def load(cls, folder: Path) -> Training:
        """Read the files of all ranks; raise ValueError if they are not those of one training on two ranks."""
        ranks: list[dict[str, Any]] = [
            torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(NUM_RANKS)
        ]
        [(num_ranks, num_steps, in_ddp)] = {(r["num_ranks"], r["num_steps"], r["in_torch_ddp"]) for r in ranks}
        if num_ranks != NUM_RANKS or num_steps == 0:
            raise ValueError(f"{num_steps} steps on {num_ranks} ranks are no training on {NUM_RANKS}.")
        return cls([rank["tensors"] for rank in ranks], num_steps, in_ddp)


@dataclass(frozen=True)
class Difference:
    """How two trainings differ.

    Attributes:
        num_tensors: that were compared.
        largest_by_name: the largest difference of two numbers, for each tensor that differs on some rank.
    """

    num_tensors: int
    largest_by_name: dict[str, float]

    @property
    def names(self) -> list[str]:
        """Return the tensors that differ, without what all names begin with."""
        return [name.removeprefix("weights.") for name in self.largest_by_name]

    @property
    def num_different(self) -> int:
        """Return how many tensors differ."""
        return len(self.largest_by_name)

    @property
    def largest(self) -> float:
        """Return the largest difference of two numbers."""
        return max(self.largest_by_name.values(), default=0.0)

    def __str__(self) -> str:
        if not self.num_different:
            return "equal bit by bit"
        return f"{self.num_different} of {self.num_tensors} tensors differ, by up to {self.largest:.1e}"


def reference(training: Training) -> Training:
    """Return `training` as if all ranks had ended with what rank 0 has, which is what a checkpoint holds."""
    return replace(training, tensors=[training.tensors[0]] * NUM_RANKS)


def difference(one: Training, other: Training) -> Difference:
    """Compare all tensors of all ranks. One that only one of them has, or in another shape, differs by infinity."""
    found: dict[str, float] = {}
    names: set[str] = set()
    for mine, theirs in zip(one.tensors, other.tensors, strict=True):
        for name in sorted(mine.keys() | theirs.keys()):
            names.add(name)
            if name not in mine or name not in theirs:
                found[name] = float("inf")
            elif not _equal_bits(mine[name], theirs[name]):
                found[name] = max(found.get(name, 0.0), _largest(mine[name], theirs[name]))
    return Difference(len(names), found)


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    # By bytes: -0.0 is not 0.0 here, and a nan equals itself.
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    return float((one.double() - other.double()).abs().nan_to_num(float("inf")).max())
