"""Training over a network, and what the network can do by itself."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from benchmarks.loop import Loop, LoopSettings
from benchmarks.models import build
from benchmarks.variants import WIRES


class NetworkLoop(Loop):
    """Variants that train in turns, and an all-reduce that nothing can hide."""

    def __init__(self, settings: LoopSettings, device: torch.device) -> None:
        super().__init__(settings, device)
        parameters = build(settings.model, device).model.parameters()
        self._num_elements = sum(parameter.numel() for parameter in parameters)

    def all_reduce(self, wire: str) -> float:
        """Seconds for as many elements as the gradients have, all at once."""
        gradients = torch.zeros(self._num_elements, dtype=WIRES[wire])
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(gradients)
        return time.perf_counter() - start
