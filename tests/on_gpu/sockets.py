"""Two ranks on hosts of their own, over sockets of NCCL: how many there are, and what stays in the environment."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy
from lightning_bucketddp.comm.connections import SETTINGS


def main() -> None:
    """Connect, look at the environment, and connect a second group, which must open as many sockets."""
    before = set(os.environ)
    fabric = Fabric(accelerator="gpu", devices=1, num_nodes=2, strategy=BucketDDPStrategy())
    fabric.launch()
    left = (set(os.environ) - before) & {*SETTINGS, "TORCH_DIST_USE_NCCL2", "GLOO_SOCKET_IFNAME"}
    assert not left, left
    tensor = torch.ones(1, device=fabric.device)
    dist.all_reduce(tensor, group=dist.new_group())
    assert tensor.item() == 2
    dist.barrier()
    print("no variable is left", flush=True)


if __name__ == "__main__":
    main()
