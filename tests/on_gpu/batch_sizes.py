"""A search for the batch size with real memory that is too small, on one rank more than on the other.

One rank per process, started by the suite.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_bucketddp.bindings.trainer_pytorch_lightning import BatchSizeFinder, BucketDDPStrategy

WIDTH = 2**20  # 4 MiB per sample
GIB = 2**30
SMALLER = 5 * GIB // 4


class Rows(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return torch.full((WIDTH,), 1.0 / (1 + index))

    def __len__(self) -> int:
        return 4096


class Hungry(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, 1))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layers(batch * 2 + 1).square().mean()

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Rows(), batch_size=self.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


def search(mode: str) -> bool:
    """Whether both ranks find the size that fits into the memory of the smaller one, and train with it."""
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    finder = BatchSizeFinder(mode=mode, steps_per_trial=2, init_val=2, margin=0.3)  # memory is fragmented
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        num_nodes=2,
        strategy=BucketDDPStrategy(),
        max_steps=3,
        callbacks=[finder],
        default_root_dir=tempfile.gettempdir(),
        **options,
    )
    module = Hungry()
    trainer.fit(module)
    found = [int(size) for size in trainer.strategy.gather_json(module.batch_size)]
    # A batch and twice as much again, and no more than that.
    largest = SMALLER // (3 * 4 * WIDTH)
    good = found[0] == found[1] and largest // 4 < found[0] <= largest and trainer.global_step == 3
    if dist.get_rank() == 0:
        print(f"{mode}: {found}, at most {largest} fit", flush=True)
    return good


def main() -> None:
    memory = SMALLER if os.environ["NODE_RANK"] == "1" else 4 * GIB
    torch.cuda.set_per_process_memory_fraction(memory / torch.cuda.get_device_properties(0).total_memory)
    good = [search(mode) for mode in ("power", "binsearch")]
    if dist.get_rank() == 0:
        print(f"\n{'passed' if all(good) else 'FAILED'} search for the batch size", flush=True)
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
