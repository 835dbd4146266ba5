"""Whether Python is the limit: the monitor and `bucketddp plan` say so of many small layers, and not of large ones."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDPMonitor, BucketDDPStrategy
from lightning_bucketddp.commands.report import typical_step_of
from lightning_bucketddp.recording.schema import find_folder, read_run
from tests.support.ranks import run_on_ranks
from tests.support.scripts.trainers import like_torchrun, make_trainer


class Layers(LightningModule):
    """Layers of one width, for batches of as many samples."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.layers: Any = nn.Sequential(*[nn.Linear(width, width) for _ in range(number)])
        self.example_input_array = torch.ones(width, width)

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)

    def training_step(self, batch: list[Tensor]) -> Any:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Small(Layers):
    def __init__(self) -> None:
        super().__init__(number=100, width=16)


class Large(Layers):
    def __init__(self) -> None:
        super().__init__(number=8, width=4096)


@like_torchrun()
def recorded(*, module: str) -> bool | None:
    """Train for 16 recorded steps; return what the record says."""
    made = globals()[module]()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            BucketDDPStrategy(), max_steps=16, callbacks=[BucketDDPMonitor(every_n_steps=1, dirpath=folder)]
        )
        trainer.fit(made, DataLoader(TensorDataset(made.example_input_array.repeat(16, 1)), len(made.layers[0].weight)))
        return typical_step_of(read_run(find_folder(Path(folder)))).is_host_bound if trainer.is_global_zero else None


def the_limit_is_named(module: str, *, is_host_bound: bool) -> list[str]:
    assert run_on_ranks(recorded, world_size=1, module=module) == [is_host_bound]
    command = [sys.executable, "-m", "lightning_bucketddp.cli", "plan", f"{__name__}:{module}"]
    told = " ".join(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout.split())
    assert f"Bound by the {'host: with' if is_host_bound else 'GPU: forward'}" in told, told
    planned = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True, timeout=200).stdout)
    without_s, with_s = planned["times"]["without_and_with_graph_s"]
    return [f"{1e3 * without_s:.2f} ms, as a graph {1e3 * with_s:.2f} ms"]
