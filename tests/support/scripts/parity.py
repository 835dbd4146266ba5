"""Jobs that train a module through the Trainer and tell what came out, with whatever strategy they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.support.scripts import models
from tests.support.scripts.trainers import like_torchrun, make_trainer


@dataclass(frozen=True)
class Scenario:
    """A module and how it is trained; `ddp` is what torch DDP needs for the same, where it needs something else."""

    module: Callable[[], LightningModule]
    options: dict[str, Any] = field(default_factory=dict)
    ddp: str = "ddp"
    ddp_module: Callable[[], LightningModule] | None = None


SCENARIOS = {
    "automatic": Scenario(models.Regression),
    # Ten batches: windows of four, four and two.
    "accumulation": Scenario(models.Regression, {"accumulate_grad_batches": 4}),
    "clip_norm": Scenario(models.Regression, {"gradient_clip_val": 0.1}),
    "clip_value": Scenario(models.Regression, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "manual_backward": Scenario(models.ManualRegression),
    "two_optimizers": Scenario(models.TwoPlayers, ddp="ddp_find_unused_parameters_true"),
    "lbfgs": Scenario(models.LBFGSRegression),
    "bf16-mixed": Scenario(models.Regression, {"precision": "bf16-mixed"}),
    "64-true": Scenario(models.Regression, {"precision": "64-true"}),
    "batchnorm": Scenario(models.ConvBatchNorm),
    "buffer_in_step": Scenario(lambda: models.RankZeroBuffer(changes_in="training_step")),
    "buffer_after_step": Scenario(lambda: models.RankZeroBuffer(changes_in="on_train_batch_end")),
    "unused_everywhere": Scenario(lambda: models.SpareLayer(used_on=()), ddp="ddp_find_unused_parameters_true"),
    "unused_on_rank_0": Scenario(lambda: models.SpareLayer(used_on=(1,)), ddp="ddp_find_unused_parameters_true"),
    "unused_on_rank_1": Scenario(lambda: models.SpareLayer(used_on=(0,)), ddp="ddp_find_unused_parameters_true"),
    "idle_rank": Scenario(
        lambda: models.IdleRank(uses_parameters=False), ddp_module=lambda: models.IdleRank(uses_parameters=True)
    ),
}


@dataclass(frozen=True)
class Training:
    """What a rank has at the end, and what it saw on the way."""

    weights: dict[str, Any]
    validation_losses: list[float]
    gradients_after_backward: list[Any]
    gradients_before_step: list[Any]


@like_torchrun()
def train(*, scenario: str, like_ddp: bool) -> Training:
    """Train `scenario`, with torch DDP or with us."""
    how = SCENARIOS[scenario]
    torch.manual_seed(dist.get_rank())  # rank 0's weights are those that count
    module = (how.ddp_module if like_ddp and how.ddp_module else how.module)()
    observer = _Observer()
    trainer = make_trainer(how.ddp if like_ddp else "bucketddp", max_epochs=2, callbacks=observer, **how.options)
    trainer.fit(module, models.loader(), models.loader())
    weights = {name: value.tolist() for name, value in module.state_dict().items()}
    return Training(weights, observer.validation_losses, observer.after_backward, observer.before_step)


class _Observer(Callback):
    def __init__(self) -> None:
        self.validation_losses: list[float] = []
        self.after_backward: list[Any] = []
        self.before_step: list[Any] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validation_losses.append(trainer.callback_metrics["loss"].item())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.after_backward.append(_gradients(pl_module))

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.before_step.append(_gradients(pl_module))


def _gradients(module: LightningModule) -> dict[str, Any]:
    return {name: p.grad.tolist() for name, p in module.named_parameters() if p.grad is not None}
