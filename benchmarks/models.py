"""Models that the benchmarks train, with random data of the right shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model and the loss of one batch."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]


def tiny_layers(device: torch.device) -> Workload:
    """500 parameters of 8 elements in a graph as shallow as possible: nothing but overhead."""
    model = _TinyLayers(500).to(device)
    x = torch.randn(8, device=device)
    return Workload(model, lambda model: model(x))


def mlp(device: torch.device) -> Workload:
    """25 M parameters and 8 samples: nothing but communication."""
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]).to(device)
    x = torch.randn(8, 2048, device=device)
    return Workload(model, lambda model: model(x).square().mean())


def resnet50(device: torch.device) -> Workload:
    """ResNet-50, bf16 autocast, channels_last, 32 images."""
    from torchvision.models import resnet50  # only here: there is no build of torchvision for every machine

    model = resnet50().to(device, memory_format=torch.channels_last)
    images = torch.randn(32, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (32,), device=device)
    return Workload(model, lambda model: _autocast_cross_entropy(model, images, labels))


def gpt2(device: torch.device) -> Workload:
    """A transformer with GPT-2's shapes (124 M parameters, tied embeddings), bf16 autocast, 4 sequences of 1,024."""
    model = _GPT2().to(device)
    ids = torch.randint(0, 50257, (4, 1024), device=device)
    return Workload(model, lambda model: _autocast_cross_entropy(model, ids, ids))


WORKLOADS: dict[str, Callable[[torch.device], Workload]] = {
    "tiny_layers": tiny_layers,
    "mlp": mlp,
    "resnet50": resnet50,
    "gpt2": gpt2,
}


def _autocast_cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
        logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


class _TinyLayers(nn.Module):
    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(num_parameters))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x * scale for scale in self.scales]).sum()


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class _GPT2(nn.Module):
    def __init__(self, width: int = 768, depth: int = 12, vocabulary: int = 50257, length: int = 1024) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[_Block(width, num_heads=12) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits
