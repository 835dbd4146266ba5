"""A fit that is long enough for a plan to be computed, and a model that is large enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.support.jobs.tuning import WIDTH, Layers
from tests.support.scripts.fit import weights
from tests.support.scripts.trainers import like_torchrun, make_trainer


class Wide(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = Layers()
        self.has_profile = False
        self.num_plans = 0

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.model(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_end(self) -> None:
        reducer = getattr(self.trainer.strategy, "reducer", None)
        if reducer is not None:
            self.has_profile = reducer.profile is not None
            self.num_plans = reducer.stats.num_plans


@dataclass(frozen=True)
class Fitted:
    weights: dict[str, str]
    has_profile: bool
    num_plans: int


def fit_wide(*, strategy: str, deterministic: bool, accumulate: int) -> Fitted:
    """25 optimizer steps."""
    before = torch.are_deterministic_algorithms_enabled()
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(2 * 2 * 25 * accumulate, WIDTH, generator=generator))
    module = Wide()
    options: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": accumulate, "deterministic": deterministic}
    try:
        with like_torchrun():
            trainer = make_trainer(strategy, **options)
            trainer.fit(module, DataLoader(data, batch_size=2))
    finally:
        torch.use_deterministic_algorithms(before)
    assert trainer.global_step == 25
    return Fitted(weights(module), module.has_profile, module.num_plans)
