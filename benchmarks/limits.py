"""What no way to train can be faster than: computing without communication, and communicating without computation."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.loop import Loop, LoopSettings
from benchmarks.ranks import synchronize
from benchmarks.variants import WIRES


class Limits(Loop):
    """Variants that train in turns, and what their steps consist of."""

    def __init__(self, settings: LoopSettings, device: torch.device) -> None:
        super().__init__(settings, device)
        self._buffers: dict[str, list[Tensor]] = {}

    def phases(self, name: str) -> dict[str, float]:
        """Seconds per step of forward, backward and optimizer."""
        training = self.training(name)
        training.step()
        self._now_on_all_ranks()
        clock: _HostClock = _DeviceClock() if self._device.type == "cuda" else _HostClock()
        clock.mark("begin")
        for _ in range(self._settings.steps):
            training.step(clock.mark)
        synchronize(self._device)
        return {phase: seconds / self._settings.steps for phase, seconds in clock.seconds().items()}

    def communicate(self, name: str) -> float:
        """Seconds in which the buckets of a step are reduced, back to back and with nothing else to do."""
        self._reduce(name)
        start = self._now_on_all_ranks()
        for _ in range(self._settings.steps):
            self._reduce(name)
        synchronize(self._device)
        return (time.perf_counter() - start) / self._settings.steps

    def _reduce(self, name: str) -> None:
        if name not in self._buffers:
            training = self.training(name)
            self._buffers[name] = [
                torch.zeros(
                    num_bytes // 4, dtype=WIRES[training.variant.wire], device=self._device
                )  # of fp32 gradients
                for num_bytes in training.attached.bucket_bytes()
            ]
        for work in [dist.all_reduce(buffer, async_op=True) for buffer in self._buffers[name]]:
            work.wait()


class _HostClock:
    """Adds up what passes between marks, by the name of the later one."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        self._marks.append((phase, self._now()))

    def seconds(self) -> dict[str, float]:
        passed = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        for (_, start), (phase, end) in zip(self._marks, self._marks[1:], strict=False):
            passed[phase] += self._between(start, end)
        return passed

    def _now(self) -> Any:
        return time.perf_counter()

    def _between(self, start: Any, end: Any) -> float:
        return float(end - start)


class _DeviceClock(_HostClock):
    """The same on the device's time line, without waiting for it."""

    def _now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000
