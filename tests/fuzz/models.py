"""The models of drawn programs: `net(x, turn)` for `x` of shape (4, 6); `turn` says which branch is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Mlp(nn.Sequential):
    """Three layers, each used once."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor, turn: int) -> Any:  # type: ignore[override]
        return super().forward(x)


class ConvAndBatchNorm(nn.Module):
    """Has buffers, which each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        # A bias would have a gradient of nothing but rounding errors: the next layer takes the mean away.
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(24, 2)

    def forward(self, x: Tensor, turn: int) -> Any:
        return self.head(torch.tanh(self.norm(self.conv(x.view(4, 1, 2, 3)))).flatten(1))


class TiedTransformer(nn.Module):
    """The first and the last weight are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        # The bias of keys would have a gradient of nothing but rounding errors, which Adam makes steps of.
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, bias=False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, turn: int) -> Any:
        tokens = (x.abs() * 3).long() % 7
        return self.head(self.layer(self.embedding(tokens)))


class Lora(nn.Module):
    """Most parameters are frozen; two small ones are trained beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 8).requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, turn: int) -> Any:
        return self.head(torch.tanh(self.base(x) + self.up(self.down(x))))


class SharedWeights(nn.Module):
    """One layer is used twice, and another one has its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, turn: int) -> Any:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))))


class Checkpointed(nn.Module):
    """Computes a part of the forward again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, turn: int) -> Any:
        return self.head(checkpoint(self.second, torch.tanh(self.first(x)), use_reentrant=False))


class Branches(nn.Module):
    """Three branches that are used in turns, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.never = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, turn: int) -> Any:
        return self.head(torch.tanh(self.branches[turn % 3](torch.tanh(self.trunk(x)))))


class BranchesByRank(Branches):
    """Ranks use different branches in one step."""


class ForwardBuffer(nn.Module):
    """A buffer that each forward changes, and that the next one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(6))
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor, turn: int) -> Any:
        with torch.no_grad():
            self.scale.mul_(0.5).add_(x.float().abs().mean(0), alpha=0.5)
        return self.layers(nn.functional.normalize(x) * self.scale)


# From simple to not so simple.
MODELS: dict[str, type[nn.Module]] = {
    "mlp": Mlp,
    "conv": ConvAndBatchNorm,
    "tied": TiedTransformer,
    "lora": Lora,
    "shared": SharedWeights,
    "checkpointed": Checkpointed,
    "branches": Branches,
    "branches_by_rank": BranchesByRank,
    "forward_buffer": ForwardBuffer,
}
# Those that do not use all parameters in each step.
WITH_UNUSED = ("branches", "branches_by_rank")
