"""Taking the time without making anybody wait: marks are made now and read later."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Makes marks, and tells the time between them."""

    def mark(self) -> Any:
        """Return a mark at this moment."""

    def seconds(self, start: Any, stop: Any) -> float:
        """Return the time from one mark to another. May wait until the device has reached both."""

    def is_past(self, mark: Any) -> bool:
        """Return whether `mark` can be read without waiting."""


class HostClock:
    """The time of this process."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, stop: float) -> float:
        return stop - start

    def is_past(self, mark: float) -> bool:
        return True


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

    def is_past(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]


def clock_of(device: torch.device) -> Clock:
    """Return the clock for what happens on `device`."""
    return DeviceClock() if device.type == "cuda" else HostClock()


class Axis:
    """Marks of a clock as seconds of `time.perf_counter`. Waits for the device once, when it is made."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._origin = clock.mark()
        clock.seconds(self._origin, self._origin)
        self._origin_s = time.perf_counter()

    def move_to(self, mark: Any) -> None:
        """Count from `mark` from now on: between distant marks a GPU tells the time with few digits."""
        self._origin_s = self.seconds(mark)
        self._origin = mark

    def seconds(self, mark: Any) -> float:
        return self._origin_s + self._clock.seconds(self._origin, mark)
