"""Tests and predicts as a user's script does, and writes down what it gets back.

LIGHTNING_ROOT=lightning.pytorch RESULTS=directory python evaluate.py popen
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDPStrategy

lightning: Any = import_module(os.environ.get("LIGHTNING_ROOT", "lightning.pytorch"))


class Evaluated(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.num_steps = 0

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        [numbers] = batch
        self.num_steps += 1
        self.log("mean", (numbers * numbers % 97).mean(), sync_dist=True)
        self.log("count", float(len(numbers)), sync_dist=True, reduce_fx="sum")

    def on_test_end(self) -> None:
        num_steps = self.all_gather(torch.tensor(self.num_steps)).tolist()
        if self.global_rank == 0:
            (Path(os.environ["RESULTS"]) / "steps.json").write_text(json.dumps(num_steps))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return batch[0] * 2


def main(launcher: str) -> None:
    """Write what `trainer.test` and `trainer.predict` return where one process would get it."""
    start_method: Any = "popen" if launcher == "torchrun" else launcher
    strategy = BucketDDPStrategy(gather_predictions=True, start_method=start_method)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_progress_bar=False
    )
    numbers = TensorDataset(torch.arange(103.0))
    loader = DataLoader(numbers, batch_size=4, num_workers=1, persistent_workers=True)
    results: dict[str, Any] = {}
    results["test"] = trainer.test(Evaluated(), loader, verbose=False)
    results["predict"] = [batch.tolist() for batch in trainer.predict(Evaluated(), loader)]
    if trainer.global_rank == 0:
        for stage, result in results.items():
            (Path(os.environ["RESULTS"]) / f"{stage}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
