"""Saves on rank 0 alone, as a script does by mistake.

RESULTS=directory python saving_alone.py [on_train_batch_end | on_train_end | after]
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Model(LightningModule):
    """Has buffers, which the ranks share before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SavesAlone(Callback):
    """Saves in the middle of a training."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            save_in("on_train_batch_end", trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        save_in("on_train_end", trainer)


def save_in(where: str, trainer: Trainer) -> None:
    if where == sys.argv[1] and trainer.is_global_zero:
        trainer.save_checkpoint(Path(os.environ["RESULTS"], "alone.ckpt"))


def main() -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="bucketddp",
        max_epochs=1,
        callbacks=SavesAlone(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2))
    save_in("after", trainer)


if __name__ == "__main__":
    main()
