"""Trains on two processes as a user's script does: the strategy by its name, and no import of our package.

LIGHTNING_ROOT=lightning.pytorch RESULTS=directory python fit.py bucketddp
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

lightning: Any = import_module(os.environ["LIGHTNING_ROOT"])


class Regression(lightning.LightningModule):
    """Starts from other weights in every process."""

    def __init__(self, run: str = "run", extra_layer_on_rank: int | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self._run = run
        self._extra_layer_on_rank = extra_layer_on_rank

    def configure_model(self) -> None:
        if self.global_rank == self._extra_layer_on_rank:
            self.extra = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        inputs = torch.linspace(-1, 1, 64).view(16, 4)
        return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=2)

    def on_fit_end(self) -> None:
        strategy = self.trainer.strategy
        result = {
            "pid": os.getpid(),
            "world_size": self.trainer.world_size,
            "steps": self.trainer.global_step,
            "strategy": type(strategy).__module__,
            "bucket_cap_mb": strategy.config.bucket_cap_mb,
            "weights": weights(self),
        }
        write(f"{self._run}.rank{self.global_rank}", result)


def weights(module: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in module.state_dict().items()}


def write(name: str, result: dict[str, Any]) -> None:
    Path(os.environ["RESULTS"], f"{name}.json").write_text(json.dumps(result))


def main() -> None:
    for strategy in sys.argv[1:]:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        module = Regression(strategy)
        trainer.fit(module)
        # Where the ranks are other processes, they have handed their weights back.
        write(f"{strategy}.main{trainer.global_rank}", weights(module))


if __name__ == "__main__":
    main()
