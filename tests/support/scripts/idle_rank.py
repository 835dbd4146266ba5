"""A function that Fabric launches by fork, in which rank 0 is done before rank 1 has begun."""

from __future__ import annotations

import time
from unittest.mock import patch

from lightning.fabric import Fabric

from lightning_bucketddp.faults import watchdog
from lightning_bucketddp.faults.side_channel import SideChannel, introduce


def work(fabric: Fabric) -> None:
    if fabric.global_rank == 1:
        print("rank 1 has worked", flush=True)


def introduce_late(channel: SideChannel, *, pid: int, place: str) -> None:
    """As on a machine that is slow."""
    if channel.rank == 1:
        time.sleep(1)
    introduce(channel, pid=pid, place=place)


if __name__ == "__main__":
    with patch.object(watchdog, "introduce", introduce_late):
        Fabric(accelerator="cpu", devices=2, strategy="bucketddp_fork").launch(work)
