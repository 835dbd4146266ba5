"""Programs with a Trainer, each trained on this rank with two strategies, and compared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support.jobs.sharding import foreign_shards_spoiled
from tests.support.scripts import models
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer


@dataclass(frozen=True)
class Program:
    """A module and how it is trained, each made on every rank, and what torch DDP needs to give the right numbers."""

    module: Callable[[], LightningModule] = models.Regression
    trainer: Callable[[], dict[str, Any]] = dict
    strategy: dict[str, Any] = field(default_factory=dict)
    ddp: str = "ddp"
    ddp_module: Callable[[], LightningModule] | None = None
    data: Callable[[], Any] = models.loader
    validates: bool = False


@dataclass(frozen=True)
class Trained:
    """What a rank has after a training; `seen` is what the module, its callbacks and loggers have noted."""

    trainer: Trainer
    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    metrics: dict[str, float]
    counts: tuple[int, int]
    seen: list[Any]


def train(
    program: Program, strategy: Any, make_module: Callable[[], LightningModule] | None = None, **of_fit: Any
) -> Trained:
    torch.manual_seed(dist.get_rank())
    module = (make_module or program.module)()
    trainer = make_trainer(strategy, **{"max_epochs": 1, "num_sanity_val_steps": 0, **program.trainer()})
    trainer.fit(module, program.data(), models.loader() if program.validates else None, **of_fit)
    noting = [module, *trainer.callbacks, *trainer.loggers]  # type: ignore[attr-defined]
    params = dict(module.named_parameters())
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return Trained(
        trainer,
        {name: value for name, value in state.items() if name in params},
        {name: value for name, value in state.items() if name not in params},
        {name: value.item() for name, value in trainer.callback_metrics.items()},
        (trainer.global_step, trainer.current_epoch),
        [getattr(one, "seen", None) for one in noting],
    )


def ours(program: Program, **options: Any) -> Trained:
    """Train with our strategy, and several buckets."""
    strategy = BucketDDPStrategy(**{"bucket_cap_mb": SMALL_BUCKETS_MB, **program.strategy, **options})
    with foreign_shards_spoiled() if options.get("shard_optimizer") else nullcontext():
        return train(program, strategy)


@like_torchrun()
def compare(program: Program, **options: Any) -> Trained:
    """Train with these options and with torch DDP; assert that all is equal, bit by bit, and return our training."""
    trained = ours(program, **options)
    assert_equal(trained, train(program, program.ddp, program.ddp_module))
    return trained


def assert_equal(one: Trained, other: Trained, *, tolerance: float = 0.0) -> None:
    for what in ("params", "metrics", "counts"):
        torch.testing.assert_close(getattr(one, what), getattr(other, what), rtol=tolerance, atol=tolerance)
    if dist.get_rank() == 0:  # torch DDP leaves the others the statistics of their last batch
        torch.testing.assert_close(one.buffers, other.buffers, rtol=tolerance, atol=tolerance)
    if tolerance:
        torch.testing.assert_close(one.seen, other.seen, rtol=1e-4, atol=tolerance)
    else:
        assert one.seen == other.seen
