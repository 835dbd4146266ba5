"""A function that Fabric launches by fork. It computes with several threads, as the launching process did before."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn


def compute() -> Tensor:
    torch.set_num_threads(2)
    with torch.no_grad():
        return nn.Linear(64, 256)(torch.ones(4096, 64)).relu()


def work(fabric: Fabric) -> None:
    print(f"rank {fabric.global_rank} has computed {list(compute().shape)}", flush=True)


if __name__ == "__main__":
    compute()
    Fabric(accelerator="cpu", devices=2, strategy="bucketddp_fork").launch(work)
    compute()
