"""A benchmark of which a rank fails."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


class Failing:
    """Fails on rank 1 while rank 0 waits for it."""

    def __init__(self, settings: None, device: torch.device) -> None:
        pass

    def fail(self) -> None:
        if dist.get_rank() == 1:
            raise ValueError("this rank failed")
        dist.barrier()

    def die(self) -> None:
        if dist.get_rank() == 1:
            os._exit(3)
        time.sleep(600)  # in a collective it would notice, and be the first to tell
