"""Jobs that see what a user sees who has configured no logging."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning_utilities.core import rank_zero
from torch import Tensor, nn

from lightning_bucketddp.bindings.registration import strategy_class
from tests.support.scripts.trainers import like_torchrun

# Settles the plan, whatever it is.
NUM_STEPS = 20


@like_torchrun()
def lines_on_terminal(*, root: str, directory: str) -> list[str]:
    """Train with `bucket_cap_mb="auto"`, save a checkpoint; return what was written to the terminal about it."""
    train = _train_with_fabric if root.endswith("fabric") else _train_with_trainer
    # A process that has imported several roots sends such lines to the last one.
    log = logging.getLogger(f"{root}.utilities.rank_zero")
    with patch.object(rank_zero, "log", log), _written_to_terminal() as lines:
        train(import_module(root), strategy_class(root)(), directory)
    return [line for line in lines if line.startswith("bucketddp: ")]


def _layers() -> nn.Module:
    """Of 2 MiB, which need three buckets."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)))


def _train_with_trainer(lightning: Any, strategy: Any, directory: str) -> None:
    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = _layers()

        def training_step(self, batch: Tensor) -> Tensor:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=NUM_STEPS,
        logger=False,
        default_root_dir=directory,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(2 * NUM_STEPS, 300)))


def _train_with_fabric(lightning: Any, strategy: Any, directory: str) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    layers = _layers()
    module, optimizer = fabric.setup(layers, torch.optim.SGD(layers.parameters(), lr=0.1))
    for _ in range(NUM_STEPS):
        fabric.backward(module(torch.ones(1, 300)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def _written_to_terminal() -> Iterator[list[str]]:
    """What this process writes to its standard error stream, whoever holds it."""
    lines: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file.read().decode().splitlines()
