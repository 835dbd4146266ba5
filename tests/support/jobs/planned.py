"""Modules that the tests of `bucketddp plan` name, and the plans that a real reducer makes of them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.sharding.shards import Shards
from tests.support.jobs.parity import build_reducer
from tests.support.ranks import device

WIDTH = 128


class Layers(nn.Module):
    """Has an example of its input, a layer that is frozen, and one that is never used."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)
        # Registered in another order than that in which they are used.
        self.last = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.large = nn.Linear(WIDTH, 16 * 1024)  # its weight travels alone
        self.words = nn.Embedding(10, WIDTH, sparse=True)
        self.example_input_array = torch.zeros(2, dtype=torch.int64)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.last(self.frozen(self.layers(self.words(x))))
        return {"small": hidden, "large": self.large(hidden)}


class Huge(nn.Module):
    """Has more parameters than any machine has memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2**20, 2**20) for _ in range(4)])


class NeedsValues(nn.Module):
    """Cannot be made without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(int(torch.ones(4).sum().item()), 2)


class NeedsArguments(nn.Module):
    def __init__(self, width: int, name: str, *, depth: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, len(name)) for _ in range(depth)])


class WithoutForward(nn.Linear):
    """Has an example that it cannot be trained on."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.example_input_array = torch.zeros(2, 5)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(3)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).requires_grad_(False)


def make_layers(width: int, *, depth: int = 2, **options: Any) -> nn.Module:
    """A factory, as torchvision has them; `options` are those of the layers."""
    return nn.Sequential(*[nn.Linear(width, width, **options) for _ in range(depth)])


def make_nothing() -> None:
    """A function that is no factory."""


def plan_of_sharded_reducer(name: str, **options: Any) -> tuple[list[list[str]], int]:
    """The same with `shard_optimizer`, and the bytes of the shards that this rank steps."""
    module = getattr(import_module(__name__), name)().to(device())
    shards = Shards(Collectives(device()), whole_parameters=False)
    reducer = build_reducer(module, shards=shards, **options)
    shards.add(torch.optim.AdamW(module.parameters()))
    buckets = _plan_after_backward(module, reducer)
    [sharded] = shards.optimizers
    return buckets, sum(member.shard.nbytes for member in sharded.members.values() if member.shard is not None)


def plan_of_reducer(name: str, **options: Any) -> list[list[str]]:
    """The buckets after a real backward, by the names in them."""
    module = getattr(import_module(__name__), name)().to(device())
    return _plan_after_backward(module, build_reducer(module, **options))


def _plan_after_backward(module: Any, reducer: Reducer) -> list[list[str]]:
    outputs = module(module.example_input_array.to(device()))
    with reducer.backward():
        sum(output.square().mean() for output in outputs.values()).backward()
    assert reducer.bucket_set is not None
    names = list(reducer.replicas.parameters)
    buckets = [[names[i] for i in bucket.members] for bucket in reducer.bucket_set.plan]
    reducer.close()
    return buckets
