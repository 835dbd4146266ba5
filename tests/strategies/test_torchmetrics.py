"""Metrics are those of one process that sees all the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.support.ranks import run_on_ranks
from tests.support.scripts.trainers import like_torchrun, make_trainer


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.metrics = nn.ModuleDict(
            {
                f"{stage}_{name}": metric
                for stage in ("train", "val")
                for name, metric in {"accuracy": MulticlassAccuracy(3, average="micro"), "mean": MeanMetric()}.items()
            }
        )

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self._step("train", batch)

    def validation_step(self, batch: list[Tensor]) -> None:
        self._step("val", batch)

    def _step(self, stage: str, batch: list[Tensor]) -> Tensor:
        inputs, labels = batch
        outputs = self.layer(inputs)
        loss = F.cross_entropy(outputs, labels)
        for name, values in {"accuracy": (outputs, labels), "mean": (inputs,)}.items():
            metric: Any = self.metrics[f"{stage}_{name}"]
            metric(*values)
            self.log(f"{stage}_{name}", metric, on_step=False, on_epoch=True)
        self.log(f"{stage}_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log(f"{stage}_samples", float(len(labels)), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _EpochValues(Callback):
    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.epochs.append({name: value.item() for name, value in trainer.callback_metrics.items()})


@like_torchrun()
def log_epochs() -> list[dict[str, float]]:
    """What is logged for each epoch, on the same samples per step whatever the number of ranks."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(48, 4, generator=generator)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=8 // dist.get_world_size())
    torch.manual_seed(dist.get_rank())
    values = _EpochValues()
    make_trainer("bucketddp", max_epochs=2, callbacks=values).fit(Classifier(), loader, loader)
    return values.epochs


def test_epoch_values_are_those_of_one_process() -> None:
    [alone] = run_on_ranks(log_epochs, world_size=1)
    assert [epoch["train_samples"] for epoch in alone] == [48, 48]
    assert len({epoch["train_accuracy"] for epoch in alone}) == 2  # it learns, so that one stale value would show
    for rank in run_on_ranks(log_epochs, world_size=2):
        for epoch, expected in zip(rank, alone, strict=True):
            assert epoch == pytest.approx(expected)
