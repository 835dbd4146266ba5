"""Loops with Fabric and `shard_optimizer`, by the letter of `ddp`: the same weights, bit for bit on two ranks.

A program is a list of moves, so that each order of them can be tried: backwards that synchronise or stay here, steps
that are taken or left out, gradients that are set to None, to zero or carried over a step.
"""

from __future__ import annotations

import copy
import math
import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy as FabricStrategy
from lightning_bucketddp.reducer import plan_cache
from lightning_bucketddp.sharding.shards import ShardOption
from tests.support.cases import for_each
from tests.support.jobs.sharding import assert_equal_on_ranks, foreign_shards_spoiled
from tests.support.ranks import on_ranks, raised_by
from tests.support.scripts import fabrics
from tests.support.scripts.models import WIDTH
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun

# Such that a slice is a multiple of what a processor computes at once: it rounds as the whole does.
HIDDEN = 32


class Net(nn.Module):
    """With a layer that is left out every third time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.spare = nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor, *, with_spare: bool) -> Tensor:
        x = self.first(x).tanh()
        return self.last(self.spare(x).tanh() if with_spare else x)


def new_optimizer(params: Any) -> torch.optim.Optimizer:
    # Decay changes a weight whose gradient is zero, but not one without a gradient.
    return torch.optim.SGD(params, lr=0.05, weight_decay=0.1)


MOVES = ("here", "synced", "step", "none", "zero", "halve")
PROGRAMS = {
    "step left out": "synced none here synced step none synced step",
    "step left out, gradients kept": "synced synced step none synced step",
    "step left out, then accumulation": "synced here synced step none here synced step",
    "gradients carried over a step": "synced step synced step here synced step",
    "zeroed in place": "synced step zero synced step zero here here synced step zero synced step",
    "cleared between micro-batches": "synced here none here synced step",
    "halved when averaged": "synced halve here halve synced halve step synced step",
}


def random_program(seed: int) -> str:
    """Return moves after which all ranks have the same weights: no step follows a backward that stays here."""
    chance = random.Random(seed)
    moves = ["synced"]
    while len(moves) < 16:
        move = chance.choice(MOVES)
        if move == "step" and not is_averaged(moves):
            move = "synced"
        moves.append(move)
    return " ".join([*moves, "synced", "step"])


def is_averaged(moves: list[str]) -> bool:
    """Return whether all that was added to gradients, since they were cleared, was averaged."""
    last = next((move for move in reversed(moves) if move in ("here", "synced", "none", "zero")), "none")
    return last != "here"


def run_program(fabric: Any, program: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Net()
    model, optimizer = fabric.setup(module, new_optimizer(module.parameters()))
    generator = torch.Generator().manual_seed(100 + fabric.global_rank)
    for number, move in enumerate(program.split()):
        if move in ("here", "synced"):
            with fabric.no_backward_sync(model, enabled=move == "here"):
                loss = model(torch.randn(8, WIDTH, generator=generator), with_spare=number % 3 > 0).square().mean()
                fabric.backward(loss)
        elif move == "step":
            optimizer.step()
        elif move == "halve":
            for param in module.parameters():
                if param.grad is not None:
                    param.grad.mul_(0.5)
        else:
            optimizer.zero_grad(set_to_none=move == "none")
    return {name: value.detach().clone() for name, value in module.named_parameters()}


@pytest.mark.parametrize(
    ("shard", "cap_mb", "large"),
    # One bucket, one for each parameter, some of both; and gradients of 64 bytes and more alone.
    [(True, 25.0, math.inf), ("parameters", 1e-3, math.inf), (True, SMALL_BUCKETS_MB, math.inf), (True, 1.0, 64)],
)
@on_ranks()
@like_torchrun()
def test_any_order_of_moves_gives_the_weights_of_ddp(shard: ShardOption, cap_mb: float, large: float) -> None:
    differ = []
    for program in [*PROGRAMS.values(), *(random_program(seed) for seed in range(8))]:
        expected = run_program(fabrics.make_fabric("ddp_find_unused_parameters_true"), program)
        with foreign_shards_spoiled(), patch.dict(plan_cache._ALONE_FROM_BYTES, cpu=large):
            strategy = FabricStrategy(bucket_cap_mb=cap_mb, shard_optimizer=shard)
            weights = run_program(fabrics.make_fabric(strategy), program)
        for name, weight in weights.items():
            assert_equal_on_ranks(weight, name)
        differ += [program] if any(not torch.equal(weights[name], expected[name]) for name in expected) else []
    assert differ == []


@for_each("shard", [False, True])
@on_ranks()
@like_torchrun()
def test_a_program_may_go_back_to_a_state_that_it_has_broadcast(shard: ShardOption) -> None:
    fabric = fabrics.make_fabric(FabricStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, shard_optimizer=shard))
    module = Net()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9))
    batch, losses = torch.randn(4, WIDTH), []
    for number in range(6):
        if number == 2:
            weights, state = copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict())
        if number == 4:
            if not state:
                with pytest.raises(ValueError, match=r"Load `fabric.broadcast\(state\)`"):
                    optimizer.load_state_dict(state)
            module.load_state_dict(weights)
            optimizer.load_state_dict(fabric.broadcast(state))
        optimizer.zero_grad()
        loss = model(batch, with_spare=True).square().mean()
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[4:] == losses[2:4]


@for_each("shard", [True, "parameters"])
@on_ranks()
@like_torchrun()
def test_another_memory_format_is_refused_on_every_rank(shard: ShardOption) -> None:
    fabric = fabrics.make_fabric(FabricStrategy(bucket_cap_mb=1e-3, shard_optimizer=shard))
    module = nn.Sequential(nn.Conv2d(1, 8, 1), nn.Conv2d(8, 16, 2), nn.Flatten(), nn.Linear(16, 1))
    model, optimizer = fabric.setup(module, new_optimizer(module.parameters()))
    for number in range(3):
        optimizer.zero_grad()
        if number == 2:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        fabric.backward(model(torch.randn(4, 1, 2, 2)).square().mean())
        if number < 2:
            optimizer.step()
    assert raised_by(optimizer.step) == (
        "RuntimeError: The memory format of `1.weight` has changed from strides (32, 4, 2, 1) to"
        " (32, 1, 16, 8) since its first step: its optimizer state is divided among the ranks (`shard_optimizer`)"
        " in the order of before. Change it before training begins, in `__init__` or `configure_model`, or set"
        " `shard_optimizer=False`."
    )
