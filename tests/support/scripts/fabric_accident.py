"""A loop with Fabric, as in a user's script, in which one rank raises, and perhaps another catches what it raises."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy
from lightning_bucketddp.strategies.options import StartMethod
from tests.support.scripts.soaked import write


class Fragile(torch.optim.SGD):
    """Fails when told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ValueError("an accident")
        return super().step(closure)


def main(
    *, directory: str, start_method: StartMethod, timeout_s: float, faults: list[dict[str, Any]], **_: Any
) -> None:
    [fault] = faults
    strategy = BucketDDPStrategy(start_method=start_method, timeout=timedelta(seconds=timeout_s))
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    module = nn.Linear(4, 1)
    module, optimizer = fabric.setup(module, fragile := Fragile(module.parameters(), lr=0.1))
    for step in range(1000):
        is_due = step == fault["step"]
        if is_due and fabric.global_rank == fault["rank"]:
            write(directory, "fault0", {"at": time.monotonic()})
            if fault["what"] == "raise":
                raise ValueError("an accident")
        fragile.fails = is_due
        optimizer.zero_grad()
        fabric.backward(module(torch.ones(2, 4)).mean())
        try:
            optimizer.step()
        except ValueError:
            if fabric.global_rank == fault["rank"]:
                raise
            time.sleep(1000)  # does something else, which does not need the other ranks


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
