"""Taking the time without making anybody wait: marks are made now and read later."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Makes marks, and tells the time between them."""

    def mark(self) -> Any:
        """A mark at this moment."""

    def seconds(self, start: Any, stop: Any) -> float:
        """The time from one mark to another. May wait until the device has come to both."""


class HostClock:
    """The time of this process."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, stop: float) -> float:
        return stop - start


class DeviceClock:
    """The time at which a GPU comes to what this process has given it to do: on the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        start.synchronize()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock for what happens on `device`."""
    return DeviceClock() if device.type == "cuda" else HostClock()
