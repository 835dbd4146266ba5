"""A loop with Fabric in which a rank makes the other one wait, or in which all get Ctrl-C in Python."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy
from tests.support.scripts.faults import write


def _begin() -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=BucketDDPStrategy())
    fabric.launch()
    return fabric


def wait_for_rank_one(*, directory: Path, where: str) -> None:
    """Let rank 0 wait for rank 1, which sleeps, in a backward or at a barrier."""
    fabric = _begin()
    module = nn.Linear(4, 1)
    module, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(10):
        if (fabric.global_rank, step) == (1, 3):
            write(directory / "fault.json", {})
            time.sleep(1000)
        if step == 3 and where == "barrier":
            fabric.barrier()
        optimizer.zero_grad()
        fabric.backward(module(torch.ones(2, 4)).mean())
        optimizer.step()


def end_the_loop_on_ctrl_c(*, directory: Path, tidies_for_s: float) -> None:
    """Leave the loop by Ctrl-C, tidy up for a while, and meet the others once more."""
    fabric = _begin()
    try:
        write(directory / f"fault{fabric.global_rank}.json", {})
        time.sleep(1000)
    except KeyboardInterrupt:
        time.sleep(tidies_for_s)
        fabric.barrier()
        write(directory / f"left{fabric.global_rank}.json", {})
