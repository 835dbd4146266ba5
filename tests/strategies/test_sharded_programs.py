"""Programs that train by the letter of `ddp`, with `shard_optimizer`: the same weights, bit for bit on two ranks.

A program is a list of moves, so that each order of them can be tried: backwards that synchronise or stay here, steps
that are taken or left out, gradients that are set to None, to zero or carried over a step.
"""

from __future__ import annotations

import copy
import math
import operator
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy as FabricStrategy
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.reducer import plan_cache
from lightning_bucketddp.sharding.shards import ShardOption
from tests.strategies.test_precision import Squares
from tests.support.jobs.sharding import assert_equal_on_ranks, foreign_shards_spoiled
from tests.support.ranks import on_ranks, raised_by, run_on_ranks
from tests.support.scripts import fabrics, models
from tests.support.scripts.trainers import like_torchrun, make_trainer

Weights = dict[str, Tensor]

# Such that a slice is a multiple of what a processor computes at once: it rounds as the whole does.
WIDTH, HIDDEN = models.WIDTH, 32


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


# --- Moves


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


def run_program(fabric: Any, program: str) -> Weights:
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


@like_torchrun()
def compare_programs(*, programs: dict[str, str], shard: Any, cap_mb: float, large: float = math.inf) -> list[str]:
    """Return the programs that leave other weights than with torch DDP; `large` gradients travel alone."""
    differ = []
    for name, program in programs.items():
        expected = run_program(fabrics.make_fabric("ddp_find_unused_parameters_true"), program)
        with foreign_shards_spoiled(), patch.dict(plan_cache._ALONE_FROM_BYTES, cpu=large):
            strategy = FabricStrategy(bucket_cap_mb=cap_mb, shard_optimizer=shard)
            weights = run_program(fabrics.make_fabric(strategy), program)
        for key, weight in weights.items():
            assert_equal_on_ranks(weight, key)
        if not all(torch.equal(weights[key], expected[key]) for key in expected):
            apart = max(float((weights[key] - expected[key]).abs().max()) for key in expected)
            differ.append(f"{name} ({program}): {apart:.1e} apart")
    return differ


@pytest.mark.parametrize(
    ("shard", "cap_mb", "large"),
    [(shard, cap_mb, math.inf) for shard in (True, "parameters") for cap_mb in (25.0, 40 / 2**20)] + [(True, 1.0, 64)],
)
def test_a_step_that_does_not_happen_changes_no_other(shard: ShardOption, cap_mb: float, large: float) -> None:
    assert run_on_ranks(compare_programs, programs=PROGRAMS, shard=shard, cap_mb=cap_mb, large=large) == [[], []]


@pytest.mark.parametrize("shard", [True, "parameters"])
def test_any_order_of_moves_gives_the_weights_of_ddp(shard: ShardOption) -> None:
    programs = {f"seed {seed}": random_program(seed) for seed in range(12)}
    assert run_on_ranks(compare_programs, programs=programs, shard=shard, cap_mb=1e-3) == [[], []]


# --- Through the Trainer


class Wide(Squares):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))

    def configure_optimizers(self) -> Any:
        return new_optimizer(self.parameters())


class Overflowing(Wide):
    """Has an infinite gradient, in one element, in the second of three windows of two micro-batches."""

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop.batch_idx == 3:
            self.layers[0].weight.grad[-1, -1] = torch.inf


class NotFinite(Wide):
    """Rank 1 has a loss that is not finite in the second window."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        loss = self.loss(batch)
        return loss * torch.inf if batch_idx == 3 and self.global_rank == 1 else loss


class Gan(Wide):
    """Two players that accumulate over two batches and step in turns; nothing keeps one out of the other's turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        strategy: Any = self.trainer.strategy
        for turn, (optimizer, sign) in enumerate(zip(self.optimizers(), (1, -1), strict=True)):
            loss = sign * self.critic(self.layers(batch[0]) - batch[1]).square().mean()
            if batch_idx % 2 == 0:
                optimizer.zero_grad()
                with strategy.block_backward_sync():
                    self.manual_backward(loss)
            else:
                self.manual_backward(loss)
                if batch_idx % 4 != 1 or turn == 0:
                    optimizer.step()

    def configure_optimizers(self) -> Any:
        return [new_optimizer(part.parameters()) for part in (self.layers, self.critic)]


class Aliases(Wide):
    """Computes with tensors that share the memory of weights, made once: before training, or in its first step."""

    def __init__(self) -> None:
        super().__init__()
        self._aliases: list[Tensor] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        weight = self.layers[0].weight
        if not self._aliases:
            of_state = self.state_dict()["layers.0.weight"]
            self._aliases = [weight.detach(), weight.data, weight.detach().view(-1), of_state]
        total = sum(alias.sin().sum() for alias in self._aliases)  # before anything uses the weight itself
        return self.loss(batch) + self.layers[2].bias.sum() * total


class PostHooks(Wide):
    """Has hooks around steps from `configure_optimizers` on: rows are normalised, and an average is kept."""

    average: Tensor

    def configure_optimizers(self) -> Any:
        optimizer = new_optimizer(self.parameters())
        self.register_buffer("average", torch.zeros_like(self.layers[0].weight))

        def normalise(*_: Any) -> None:
            with torch.no_grad():
                weight = self.layers[0].weight
                weight.div_(weight.norm(dim=1, keepdim=True))

        def keep_average(stepped: Any, *_: Any) -> None:
            first = stepped.param_groups[0]["params"][0]
            assert first is self.layers[0].weight
            self.average.lerp_(first.detach(), 0.1)

        optimizer.register_step_post_hook(normalise)
        optimizer.register_step_post_hook(keep_average)
        return optimizer

    def on_train_start(self) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)

        def check(stepped: Any, *_: Any) -> None:
            params = [param for group in stepped.param_groups for param in group["params"]]
            assert all(map(operator.is_, params, self.parameters()))

        optimizer.register_step_pre_hook(check)


class Averaging(Wide):
    """Keeps an average of itself, in a hook of Lightning's right after the step, and learns from it."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.layers).requires_grad_(False)
        self._stored: list[Tensor] = []

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self._stored = self._stored or [param.data for param in self.layers.parameters()]
        with torch.no_grad():
            for mine, others in zip(self.average.parameters(), self._stored, strict=True):
                mine.lerp_(others, 0.1)
        self.to(self.device)  # where it is already

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.loss(batch) + (self.layers(batch[0]) - self.average(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        return new_optimizer(self.layers.parameters())


def _scaler() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    return {"plugins": MixedPrecision("16-mixed", "cpu", scaler=scaler), "accumulate_grad_batches": 2}


FITS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "overflow of a GradScaler": (Overflowing, _scaler),
    "GAN that accumulates": (Gan, dict),
    "aliases of weights": (Aliases, dict),
    "hooks around steps": (PostHooks, dict),
    "average of weights": (Averaging, dict),
}


def fit(module: Any, strategy: Any, **options: Any) -> Weights:
    trainer = make_trainer(strategy, max_epochs=1, **options)
    with foreign_shards_spoiled():
        trainer.fit(module, models.loader())
    scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
    scale = {} if scaler is None else {"scale": torch.tensor(scaler.get_scale())}
    return {**{name: value.clone() for name, value in module.state_dict().items()}, **scale}


@pytest.mark.parametrize("shard", [True, "parameters"])
@pytest.mark.parametrize("name", FITS)
@pytest.mark.sampled(6)
@on_ranks()
@like_torchrun()
def test_a_fit_gives_the_weights_of_ddp(name: str, shard: ShardOption) -> None:
    make, options = FITS[name]
    outcomes = []
    for strategy in ("ddp", BucketDDPStrategy(bucket_cap_mb=1e-3, shard_optimizer=shard, on_nonfinite=None)):
        torch.manual_seed(0)
        outcomes.append(fit(make(), strategy, **options()))
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=0, atol=0)


@pytest.mark.parametrize("shard", [True, "parameters"])
@on_ranks()
@like_torchrun()
def test_a_step_that_is_skipped_for_a_nan_changes_no_other(shard: ShardOption) -> None:
    """Train with `on_nonfinite="skip"`, which torch DDP does not know, with and without sharding."""
    outcomes = []
    for option in (False, shard):
        torch.manual_seed(0)
        strategy = BucketDDPStrategy(bucket_cap_mb=1e-3, shard_optimizer=option, on_nonfinite="skip")
        outcomes.append(fit(NotFinite(), strategy, accumulate_grad_batches=2))
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=0, atol=0)


# --- Memory formats


@pytest.mark.parametrize("shard", [True, "parameters"])
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
