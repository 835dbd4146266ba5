"""Models that the benchmarks train, with random data of the right shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

Unused = Literal["none", "same", "changing"]


class Layer(nn.Module):
    """A layer that keeps the shape of what it gets, so that a step can leave it out."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.is_skipped = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.is_skipped else self.layer(x)


@dataclass(frozen=True)
class Workload:
    """A model and the loss of one batch."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]

    @cached_property
    def _layers(self) -> list[Layer]:
        return [module for module in self.model.modules() if isinstance(module, Layer)]

    def leave_out(self, unused: Unused, step: int) -> None:
        """Every tenth layer or none, the same ones in each step or others."""
        if unused == "none":
            return
        for index, layer in enumerate(self._layers):
            layer.is_skipped = (index + (step if unused == "changing" else 0)) % 10 == 0


def tiny_layers(device: torch.device) -> Workload:
    """500 parameters of 8 elements in a graph as shallow as possible: nothing but overhead."""
    model = _Parameters([8] * 500, join=torch.stack).to(device)
    x = torch.randn(8, device=device)
    return Workload(model, lambda model: model(x))


def mlp(device: torch.device) -> Workload:
    """25 M parameters and 8 samples: nothing but communication."""
    layers = [Layer(nn.Sequential(nn.Linear(2048, 2048), nn.ReLU())) for _ in range(6)]
    model = nn.Sequential(*layers).to(device)
    x = torch.randn(8, 2048, device=device)
    return Workload(model, lambda model: model(x).square().mean())


def resnet50(device: torch.device, samples: int = 32) -> Workload:
    """ResNet-50, bf16 autocast, channels_last."""
    from torchvision.models import resnet50  # only here: there is no build of torchvision for every machine

    model = resnet50()
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        for index in range(1, len(stage)):
            stage[index] = Layer(stage[index])
    model = model.to(device, memory_format=torch.channels_last)
    images = torch.randn(samples, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (samples,), device=device)
    return Workload(model, lambda model: _autocast_cross_entropy(model, images, labels))


def gpt2(device: torch.device, samples: int = 4) -> Workload:
    """A transformer with GPT-2's shapes (124 M parameters, tied embeddings), bf16 autocast, sequences of 1,024."""
    model = _GPT2().to(device)
    ids = torch.randint(0, 50257, (samples, 1024), device=device)
    return Workload(model, lambda model: _autocast_cross_entropy(model, ids, ids))


def resnet50_shapes(device: torch.device) -> Workload:
    """Parameters as many as ResNet-50 has and in its proportions, but 1,024 times smaller, with no computation."""
    return _shapes(device, _resnet50_sizes())


def gpt2_shapes(device: torch.device) -> Workload:
    """The same for GPT-2."""
    return _shapes(device, _gpt2_sizes())


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "tiny_layers": tiny_layers,
    "mlp": mlp,
    "resnet50": resnet50,
    "gpt2": gpt2,
    "resnet50_shapes": resnet50_shapes,
    "gpt2_shapes": gpt2_shapes,
}
# By what the sizes of parameters are cut down; divide a bucket's size by it to get as many buckets.
SHRUNK_BY = 1024


def build(name: str, device: torch.device, *, samples: int | None = None) -> Workload:
    """The workload of this name, with the same weights on every rank and each time, and as many samples in a batch."""
    torch.manual_seed(0)
    with device:  # so that a GPU makes the random numbers, not a core
        return WORKLOADS[name](device) if samples is None else WORKLOADS[name](device, samples)


def _shapes(device: torch.device, sizes: Sequence[int]) -> Workload:
    model = _Parameters([max(size // SHRUNK_BY, 1) for size in sizes], join=torch.cat).to(device)
    one = torch.ones(1, device=device)
    return Workload(model, lambda model: model(one))


def _resnet50_sizes() -> list[int]:
    """Of ResNet-50's parameters, in the order in which they are registered."""

    def convolution(inputs: int, outputs: int, width: int) -> list[int]:
        return [inputs * outputs * width * width, outputs, outputs]  # with its normalisation

    sizes = convolution(3, 64, 7)
    inputs = 64
    for channels, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            sizes += convolution(inputs, channels, 1) + convolution(channels, channels, 3)
            sizes += convolution(channels, 4 * channels, 1)
            if block == 0:
                sizes += convolution(inputs, 4 * channels, 1)
            inputs = 4 * channels
    return [*sizes, 2048 * 1000, 1000]


def _gpt2_sizes(width: int = 768) -> list[int]:
    block = [width] * 4 + [3 * width * width, 3 * width, width * width, width]
    block += [4 * width * width, 4 * width, 4 * width * width, width]
    return [50257 * width, 1024 * width, *block * 12, width, width]


def _autocast_cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
        logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


class _Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _Parameters(nn.Module):
    """Parameters of some sizes, and as little computation with them as possible."""

    def __init__(self, sizes: Sequence[int], *, join: Callable[[list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.scales = nn.ModuleList(Layer(_Scale(size)) for size in sizes)
        self._join = join

    def forward(self, x: Tensor) -> Tensor:
        return self._join([scale(x) for scale in self.scales]).sum()


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
        self.blocks = nn.Sequential(*[Layer(_Block(width, num_heads=12)) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits
