"""What is learned to see how well: three models that reach a score in a minute of a core, on data that is made here.

* `digits`: pictures of digits, turned, bent and noisy, and a small convolutional network.
* `chars`: the documents and sources of this repository, and a small GPT that reads characters.
* `images`: shapes with textures under noise, and a small ResNet with BatchNorm.

Nothing is downloaded. The data are the same for every seed: a seed decides the first weights and the order of samples.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

_REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class Data:
    """Samples by index: inputs and what they are labelled with, to train on and to test with.

    Attributes:
        digest: of data that change with this repository; 0 for those that do not.
    """

    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    digest: int = 0


@dataclass(frozen=True)
class Task:
    """A model and what it learns.

    Attributes:
        data: makes the data, the same each time.
        model: makes a model with random weights.
        global_batch: samples in a step, of all ranks together.
        lr: the highest learning rate of AdamW, for that batch.
        tells_accuracy: whether accuracy is the score; else it is the loss.
    """

    data: Callable[[], Data]
    model: Callable[[], nn.Module]
    global_batch: int
    lr: float
    tells_accuracy: bool


# By row: five pixels, a bit each.
_GLYPHS = [
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 2, 4, 8, 31),
    (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
]
_PIXELS = 16


@lru_cache
def _digits(num_training: int = 16384, num_test: int = 2048) -> Data:
    random = torch.Generator().manual_seed(1)
    number = num_training + num_test
    labels = torch.randint(10, (number,), generator=random)
    glyphs = torch.tensor([[[row >> bit & 1 for bit in range(4, -1, -1)] for row in rows] for rows in _GLYPHS])
    drawn = F.pad(glyphs.float(), (2, 2, 1, 1))[labels, None]
    turn, slant = 0.25 * _normal(random, number), 0.2 * _normal(random, number)
    width, height = 1.0 + 0.2 * _normal(random, number), 1.0 + 0.2 * _normal(random, number)
    rows = [turn.cos() * width, slant - turn.sin(), 0.15 * _normal(random, number)]
    rows += [turn.sin(), turn.cos() * height, 0.15 * _normal(random, number)]
    grid = F.affine_grid(torch.stack(rows, dim=1).view(-1, 2, 3), [number, 1, _PIXELS, _PIXELS], align_corners=False)
    images = F.grid_sample(drawn, grid, align_corners=False)
    images += 0.35 * torch.randn(images.shape, generator=random)
    return _split(images, labels, num_training)


def _normal(random: torch.Generator, number: int) -> Tensor:
    return torch.randn(number, generator=random)


def _split(inputs: Tensor, labels: Tensor, num_training: int) -> Data:
    return Data(inputs[:num_training], labels[:num_training], inputs[num_training:], labels[num_training:])


def _digit_classifier() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (_PIXELS // 4) ** 2, 96),
        nn.ReLU(),
        nn.Linear(96, 10),
    )


_CONTEXT = 40


@lru_cache
def _characters() -> Data:
    """Windows of the text; every tenth block of it is for the test."""
    paths = sorted([*_REPOSITORY.glob("docs/*.md"), *_REPOSITORY.glob("lightning_bucketddp/**/*.py")])
    # One alphabet for any text: what is beyond ASCII is one character more.
    text = "\n".join(path.read_text() for path in paths).encode("ascii", errors="replace")
    numbers = torch.tensor(list(text), dtype=torch.long)
    windows = numbers.unfold(0, _CONTEXT + 1, _CONTEXT)
    block = torch.arange(len(windows)) // 40
    training, test = windows[block % 10 != 9], windows[block % 10 == 9][::2]
    return Data(training[:, :-1], training[:, 1:], test[:, :-1], test[:, 1:], digest=zlib.crc32(text))


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.queries_keys_values(self.norms[0](x)).unflatten(-1, (3, self.num_heads, -1))
        queries, keys, values = (part.transpose(1, 2) for part in heads.unbind(dim=2))
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(start_dim=2))
        return x + self.network(self.norms[1](x))


class _CharacterGPT(nn.Module):
    def __init__(self, *, width: int = 48, num_blocks: int = 2) -> None:
        super().__init__()
        self.characters = nn.Embedding(128, width)
        self.positions = nn.Embedding(_CONTEXT, width)
        self.blocks = nn.Sequential(*(_Block(width, num_heads=4) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 128, bias=False)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.characters(characters) + self.positions.weight
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)  # type: ignore[no-any-return]


@lru_cache
def _images(num_training: int = 24576, num_test: int = 2048) -> Data:
    """Ten classes: two textures, five directions each, within a disc, a square or a ring, which tells nothing."""
    random = torch.Generator().manual_seed(2)
    number = num_training + num_test
    labels = torch.randint(10, (number,), generator=random)

    def between(low: float, high: float) -> Tensor:
        return (low + (high - low) * torch.rand(number, generator=random)).view(-1, 1, 1)

    y, x = torch.meshgrid(torch.linspace(-1, 1, _PIXELS), torch.linspace(-1, 1, _PIXELS), indexing="ij")
    direction = (labels % 5).view(-1, 1, 1) * math.pi / 5 + between(-0.15, 0.15)
    across, along = x * direction.cos() + y * direction.sin(), y * direction.cos() - x * direction.sin()
    waves = (between(7, 9) * across + between(0, 6.3)).sin()
    checks = waves * (between(7, 9) * along + between(0, 6.3)).sin().sign()
    texture = torch.where((labels < 5).view(-1, 1, 1), waves, checks)
    x, y = x - between(-0.3, 0.3), y - between(-0.3, 0.3)
    radius = (x**2 + y**2).sqrt()
    shapes = torch.stack([radius < 0.7, torch.maximum(x.abs(), y.abs()) < 0.6, (radius - 0.55).abs() < 0.3])
    inside = shapes[torch.randint(3, (number,), generator=random), torch.arange(number)]
    colours = torch.rand(number, 3, 1, 1, generator=random) + 0.3
    images = colours * (texture * inside)[:, None]
    images += 1.0 * torch.randn(images.shape, generator=random)
    return _split(images, labels, num_training)


class _ResidualBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolutions(x) + self.shortcut(x))


def _resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        _ResidualBlock(8, 16, stride=2),
        _ResidualBlock(16, 24, stride=2),
        _ResidualBlock(24, 48, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 10),
    )


TASKS: dict[str, Task] = {
    "digits": Task(_digits, _digit_classifier, global_batch=64, lr=2e-3, tells_accuracy=True),
    "chars": Task(_characters, _CharacterGPT, global_batch=32, lr=4e-3, tells_accuracy=False),
    "images": Task(_images, _resnet, global_batch=64, lr=4e-3, tells_accuracy=True),
}


@dataclass(frozen=True)
class Score:
    """How well a model does on the data for the test."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(model: nn.Module, data: Data) -> Score:
    """Evaluate `model` on all data for the test."""
    model.eval()
    loss, num_right, number = 0.0, 0, 0
    for inputs, labels in zip(data.test_inputs.split(256), data.test_labels.split(256), strict=True):
        outputs = model(inputs)
        loss += F.cross_entropy(outputs, labels, reduction="sum").item()
        num_right += int((outputs.argmax(dim=1) == labels).sum())
        number += labels.numel()
    model.train()
    return Score(loss / number, num_right / number)


def schedule(step: int, num_steps: int) -> float:
    """Return what the learning rate is multiplied with: a short way up, then down to zero along a cosine."""
    return min(1.0, (step + 1) / (0.05 * num_steps)) * (1 + math.cos(math.pi * step / num_steps)) / 2
