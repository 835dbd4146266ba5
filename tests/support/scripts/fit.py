"""Trains as a user's script does: the strategy by its name, and no import of our package.

LIGHTNING_ROOT=lightning.pytorch RESULTS=directory python fit.py bucketddp
"""

import argparse
import hashlib
import json
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

lightning: Any = import_module(os.environ.get("LIGHTNING_ROOT", "lightning.pytorch"))


class Regression(lightning.LightningModule):
    """Every rank starts from weights of its own, the same in every run; rank 0's count."""

    def __init__(self, width: int = 2, extra_layer_on_rank: int | None = None) -> None:
        super().__init__()
        self.layers: Any = nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 1))
        self._extra_layer_on_rank = extra_layer_on_rank
        self.num_samples = SumMetric()

    def configure_model(self) -> None:
        torch.manual_seed(self.global_rank)
        for layer in self.layers:
            layer.reset_parameters()
        if self.global_rank == self._extra_layer_on_rank:
            self.extra = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        self.num_samples.update(len(inputs))
        return F.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        inputs = torch.linspace(-1, 1, 64).view(16, 4)
        return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=2)


class Report(lightning.Callback):
    """Writes down what each rank has at the end of a fit."""

    def __init__(self, run: str = "run") -> None:
        self._run = run

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        result = {
            "pid": os.getpid(),
            "directory": os.getcwd(),
            "network": os.readlink("/proc/self/ns/net"),
            "world_size": trainer.world_size,
            "node": trainer.node_rank,
            "steps": trainer.global_step,
            "strategy": type(trainer.strategy).__module__,
            "bucket_cap_mb": _bucket_cap_mb(trainer.strategy),
            "weights": weights(pl_module),
            "samples": float(pl_module.num_samples.sum_value),
        }
        write(f"{self._run}.rank{trainer.global_rank}", result)


def _bucket_cap_mb(strategy: Any) -> float | list[float] | str | None:
    """None for a strategy that is not ours."""
    cap = strategy.config.bucket_cap_mb if hasattr(strategy, "config") else None
    # Hydra gives lists of a kind of its own.
    return list(cap) if isinstance(cap, Sequence) and not isinstance(cap, str) else cap


def weights(module: nn.Module) -> dict[str, str]:
    """A fingerprint of each parameter."""
    return {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in module.state_dict().items()}


def write(name: str, result: dict[str, Any] | list[str]) -> None:
    Path(os.environ["RESULTS"], f"{name}.json").write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("strategies", nargs="+")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--width", type=int, default=2)
    parser.add_argument("--destroy-group", action="store_true", help="after each fit")
    arguments = parser.parse_args()
    variables = set(os.environ)
    for strategy in arguments.strategies:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=arguments.devices,
            num_nodes=arguments.num_nodes,
            strategy=strategy,
            max_epochs=2,
            callbacks=Report(strategy),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        module = Regression(arguments.width)
        trainer.fit(module)
        # Where the ranks are other processes, they have handed their weights back.
        write(f"{strategy}.main{trainer.global_rank}", weights(module))
        write(f"{strategy}.variables{trainer.global_rank}", sorted(set(os.environ) - variables))
        if arguments.destroy_group:
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
