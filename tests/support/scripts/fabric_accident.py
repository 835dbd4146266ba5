"""A loop with Fabric, as in a user's script, in which one rank raises."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_bucketddp.strategies.fabric_lightning import BucketDDPStrategy
from lightning_bucketddp.strategies.options import StartMethod
from tests.support.scripts.soaked import write


def main(
    *, directory: str, start_method: StartMethod, timeout_s: float, faults: list[dict[str, Any]], **_: Any
) -> None:
    [fault] = faults
    strategy = BucketDDPStrategy(start_method=start_method, timeout=timedelta(seconds=timeout_s))
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    module = nn.Linear(4, 1)
    module, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(1000):
        if (fabric.global_rank, step) == (fault["rank"], fault["step"]):
            write(directory, "fault0", {"at": time.monotonic()})
            raise ValueError("an accident")
        optimizer.zero_grad()
        fabric.backward(module(torch.ones(2, 4)).mean())
        optimizer.step()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
