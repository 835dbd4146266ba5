"""What the reader of a document has already: a module, data, and a type of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader


@dataclass
class MyConfig:
    width: int = 8


class MyModule(LightningModule):
    def __init__(self, width: int = MyConfig.width) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch["inputs"]), batch["labels"])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.log("val_loss", self.training_step(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class MyData(LightningDataModule):
    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        inputs = torch.linspace(-1, 1, 1024).view(256, 4)
        samples = [{"inputs": x, "labels": (x.sum() > 0).long()} for x in inputs]
        return DataLoader(samples, batch_size=4)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self.train_dataloader()
