"""Models and losses that the parity tests train, each with what is special about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.ranks import device

WIDTH = 8


@dataclass(frozen=True)
class Case:
    """A model, how to compute its loss on a rank at a step, and what torch DDP needs to train it (None: it cannot)."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], Tensor]
    ddp: dict[str, Any] | None = field(default_factory=dict)
    on_step: Callable[[nn.Module, int], None] = lambda model, step: None


def batch(rank: int, step: int, *shape: int) -> Tensor:
    """Different data on every rank and at every step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*(shape or (4, WIDTH)), generator=generator).to(device())


def tokens(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 16, (4, 6), generator=generator).to(device())


def mean_square(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).square().mean()


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 3), nn.LayerNorm(3)
    )


def conv_batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=4), nn.BatchNorm2d(4)
    )


def channels_last() -> nn.Module:
    return conv_batchnorm().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def image_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    images = batch(rank, step, 2, 3, 8, 8)
    if not all(param.is_contiguous() for param in model.parameters()):
        images = images.to(memory_format=torch.channels_last)
    # Not the mean of squares, which batch normalisation makes constant.
    return model(images).tanh().mul(batch(0, 0, 2, 4, 4, 4)).mean()


class TiedTransformer(nn.Module):
    """Input and output embedding are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def token_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(tokens(rank, step))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class ManyDtypes(nn.Module):
    """Parameters of three dtypes, in turns."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float64]
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(cast(Tensor, layer.weight).dtype)).tanh()
        return x


class SparseEmbedding(nn.Module):
    """Sparse gradients beside dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.randn(3, WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(self.linear(x)) * self.scale + self.shift.sum(0)
        return spectrum.abs()


class Branches(nn.Module):
    """Two branches; the caller says which one to take. `never` is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.left = nn.Linear(WIDTH, 4)
        self.never = nn.Linear(WIDTH, 4)
        self.right = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, *, left: bool, right: bool) -> Tensor:
        hidden = self.trunk(x)
        output = hidden.mean()
        if left:
            output = output + self.left(hidden).square().mean()
        if right:
            output = output + self.right(hidden).square().mean()
        return output


def everything_unused_on_one_rank(model: nn.Module, rank: int, step: int) -> Tensor:
    if rank == 1:
        return batch(rank, step).requires_grad_().sum()
    return model(batch(rank, step), left=True, right=True)


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in backward; optionally the same block each time."""

    def __init__(self, *, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(WIDTH, WIDTH)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        self.blocks = nn.ModuleList([blocks[0]] * 3 if shared else blocks)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def partly_frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    model[2].requires_grad_(False)  # type: ignore[index]
    return model


def freeze_and_unfreeze(model: nn.Module, step: int) -> None:
    """Step 1 freezes the first layer, step 2 unfreezes it and freezes the third, step 3 trains all."""
    first, third = model[0], model[2]  # type: ignore[index]
    first.requires_grad_(step != 1)
    third.requires_grad_(step != 2)
    for layer in (first, third):
        if not layer.weight.requires_grad:
            layer.zero_grad()


class Queue(nn.Module):
    """A buffer that forward writes and reads, different on every rank unless someone keeps it equal."""

    queue: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("queue", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x) - self.queue
        # Replaced, not written in place: both happen in practice.
        self.queue = 0.5 * self.queue + 0.5 * x.detach().mean(0)
        self.steps += 1
        return output


UNUSED = {"find_unused_parameters": True}
CASES: dict[str, Case] = {
    "mlp": Case(mlp, mean_square),
    "conv_batchnorm": Case(conv_batchnorm, image_loss),
    "channels_last": Case(channels_last, image_loss),
    "tied_transformer": Case(TiedTransformer, token_loss),
    "rnn": Case(Recurrent, lambda model, rank, step: model(batch(rank, step, 4, 5, WIDTH)).square().mean()),
    "many_dtypes": Case(ManyDtypes, mean_square),
    "sparse_embedding": Case(SparseEmbedding, token_loss),
    # Without the broadcast at the start, which the gloo of older versions refuses for complex tensors.
    "complex": Case(Complex, mean_square, {"init_sync": False}),
    "unused_on_all_ranks": Case(
        Branches, lambda model, rank, step: model(batch(rank, step), left=True, right=False), UNUSED
    ),
    "unused_on_one_rank": Case(
        Branches, lambda model, rank, step: model(batch(rank, step), left=True, right=rank != 1), UNUSED
    ),
    "unused_in_turns": Case(
        Branches,
        lambda model, rank, step: model(batch(rank, step), left=(rank + step) % 2 == 0, right=(rank + step) % 2 == 1),
        UNUSED,
    ),
    "everything_unused_on_one_rank": Case(Branches, everything_unused_on_one_rank, None),
    "checkpoint": Case(lambda: Checkpointed(reentrant=False, shared=False), mean_square),
    "checkpoint_reentrant": Case(lambda: Checkpointed(reentrant=True, shared=False), mean_square),
    "checkpoint_shared": Case(lambda: Checkpointed(reentrant=False, shared=True), mean_square),
    "checkpoint_reentrant_shared": Case(
        lambda: Checkpointed(reentrant=True, shared=True), mean_square, {"static_graph": True}
    ),
    "partly_frozen": Case(partly_frozen, mean_square),
    "freeze_and_unfreeze": Case(mlp, mean_square, None, freeze_and_unfreeze),
    "buffer_in_forward": Case(Queue, mean_square),
}
