"""What the host does in a step."""

from __future__ import annotations

import time

import torch

from benchmarks.loop import Loop, LoopSettings
from benchmarks.ranks import synchronize


class HostTime(Loop):
    """Variants whose time on the host is measured, in turns of one step."""

    def __init__(self, settings: LoopSettings, device: torch.device) -> None:
        super().__init__(settings, device)
        # With a GPU other threads of this process work for the step, too.
        self._clock = time.thread_time_ns if device.type == "cpu" else time.perf_counter_ns

    def turn(self, name: str) -> float:
        """Microseconds of `zero_grad` + backward."""
        training = self.training(name)
        loss = training.workload.loss(training.attached.model)
        synchronize(self._device)
        start = self._clock()
        training.attached.model.zero_grad()
        with training.attached.backward():
            loss.backward()
        taken = self._clock() - start
        synchronize(self._device)
        return taken / 1000

    def num_buckets(self, name: str) -> int:
        """Into how many buckets a variant has put the gradients."""
        return len(self.training(name).attached.bucket_bytes())
