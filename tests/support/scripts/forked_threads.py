"""A function that Fabric launches by fork. It computes with several threads, as the launching process did before, or
with the number of threads that is given.
"""

from __future__ import annotations

import faulthandler
import sys

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn


def compute(num_threads: int = 2) -> Tensor:
    torch.set_num_threads(num_threads)
    with torch.no_grad():
        return nn.Linear(64, 256)(torch.ones(4096, 64)).relu()


def work(fabric: Fabric) -> None:
    faulthandler.dump_traceback_later(20, exit=True)  # where OpenMP waits for ever
    result = compute()
    faulthandler.cancel_dump_traceback_later()
    # In one piece: an unbuffered `print` writes the end of the line by itself, and another rank may come between.
    sys.stdout.write(f"rank {fabric.global_rank} has computed {list(result.shape)}\n")


if __name__ == "__main__":
    compute(*map(int, sys.argv[1:]))
    Fabric(accelerator="cpu", devices=2, strategy="bucketddp_fork").launch(work)
    compute()
