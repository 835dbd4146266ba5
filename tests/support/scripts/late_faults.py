"""A program whose rank 1 fails when rank 0 is through: `late_faults.py START_METHOD FUNCTION HOOK FAULT`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.processes import is_running


class Model(LightningModule):
    def __init__(self, hook: str, fault: str) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        setattr(self, hook, lambda **_: self._fail(fault))

    def _fail(self, fault: str) -> None:
        if self.global_rank == 0:
            Path("rank_zero").write_text(str(os.getpid()))
        else:
            wait_until_rank_zero_is_through()
            if fault == "raise":
                raise ValueError("an accident")
            os.kill(os.getpid(), signal.SIGABRT)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def test_step(self, batch: list[Tensor]) -> None:
        self.log("loss", self.layer(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def wait_until_rank_zero_is_through() -> None:
    while not Path("rank_zero").exists() or is_running(int(Path("rank_zero").read_text() or os.getpid())):
        if Path("is_through").exists():
            time.sleep(0.5)  # it is at its end, if it waits there
            return
        time.sleep(0.05)


if __name__ == "__main__":
    start_method, function, hook, fault = sys.argv[1:]
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=BucketDDPStrategy(start_method=start_method),  # type: ignore[arg-type]
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=OnExceptionCheckpoint("saved"),
    )
    getattr(trainer, function)(Model(hook, fault), DataLoader(TensorDataset(torch.ones(4, 1))))
    if trainer.global_rank == 0:
        Path("is_through").touch()
