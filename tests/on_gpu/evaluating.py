"""Test and prediction on a GPU, of samples that the ranks cannot divide; one rank per process, started by the suite."""

from __future__ import annotations

import sys
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_bucketddp.bindings.trainer_pytorch_lightning import BucketDDPStrategy

NUMS_OF_SAMPLES = (1, 2, 33, 103)


class Squares(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.metric = MeanMetric()

    def test_step(self, batch: list[Tensor]) -> None:
        [numbers] = batch
        self.metric(numbers * numbers)
        self.log("metric", self.metric)
        self.log("mean", (numbers * numbers).mean(), sync_dist=True)
        self.log("count", float(len(numbers)), sync_dist=True, reduce_fx="sum")

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        return batch[0] * 2


def is_exact(num_samples: int) -> bool:
    """Whether ranks test and predict as one process does."""
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = BucketDDPStrategy(gather_predictions=True)
    trainer = pl.Trainer(accelerator="gpu", devices=1, num_nodes=2, strategy=strategy, **options)
    numbers = torch.arange(float(num_samples))
    loader = DataLoader(TensorDataset(numbers), batch_size=4)
    [tested] = trainer.test(Squares(), loader, verbose=False)
    mean = (numbers * numbers).mean().item()
    good = tested["count"] == num_samples and all(
        abs(tested[name] / (mean or 1) - bool(mean)) < 1e-6 for name in ("mean", "metric")
    )
    predicted = trainer.predict(Squares(), loader)
    if dist.get_rank() == 0:
        good &= all(torch.equal(*pair) for pair in zip(predicted, (numbers * 2).split(4), strict=True))
    return good


def main() -> None:
    good = {num_samples: is_exact(num_samples) for num_samples in NUMS_OF_SAMPLES}
    if dist.get_rank() == 0:
        print(f"\n{'passed' if all(good.values()) else 'FAILED'} exact evaluation: {good}", flush=True)
    sys.exit(not all(good.values()))


if __name__ == "__main__":
    main()
