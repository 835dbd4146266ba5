"""Seeing when a reduction ends, without waiting for it where the step is made.

Note: ends of reductions
    On a GPU a stream beside the others waits for each reduction, and a mark is made on it. On a CPU a thread does the
    same: it waits inside gloo, where it needs nothing of Python's, and looks at the clock when it is woken. A callback
    of the reduction's future would be simpler, but it runs in one of gloo's few threads and needs the interpreter: the
    next reduction waits until the training thread lets go of it, and for ever where that thread waits for the end of
    the process group. Looking now and then whether a reduction has ended would see most ends one bucket too late.

    The thread may be woken late on a busy machine. But the step itself waits for all reductions in order, so each has
    ended when that wait is over; whatever was seen first counts.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from lightning_bucketddp.comm.collectives import Pending
from lightning_bucketddp.reducer.clock import Clock

_ENDS_WITHIN_S = 1.0


@dataclass(slots=True)
class Sighting:
    """The mark at which something was seen to end; None: it was not, so far."""

    mark: Any = None


class Observer(Protocol):
    """Sees reductions end (Note: ends of reductions)."""

    def watch(self, transfer: Pending) -> Sighting:
        """Mark the end of `transfer` as soon as it comes."""

    def close(self) -> None:
        """Watch nothing any more."""


class HostObserver:
    """A thread that waits for one reduction after the other, in the order in which they run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._to_watch: SimpleQueue[tuple[Pending, Sighting] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bucketddp-observer", daemon=True)
        self._thread.start()

    def watch(self, transfer: Pending) -> Sighting:
        sighting = Sighting()
        self._to_watch.put((transfer, sighting))
        return sighting

    def close(self) -> None:
        self._to_watch.put(None)
        # It may wait for a rank that is gone; then it ends with the process.
        self._thread.join(timeout=_ENDS_WITHIN_S)

    def _run(self) -> None:
        while (watched := self._to_watch.get()) is not None:
            transfer, sighting = watched
            with suppress(Exception):  # the step waits for it, too, and is the one to raise
                transfer.wait()
                sighting.mark = self._clock.mark()
            del watched, transfer  # gradients hang on it


class DeviceObserver:
    """A stream that waits for each reduction."""

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self._clock = clock
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # With this setting of torch's it is the host that waits.
        self._is_blind = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") != "0"

    def watch(self, transfer: Pending) -> Sighting:
        if self._is_blind:
            return Sighting()
        with torch.cuda.stream(self._stream):
            transfer.wait()
            return Sighting(self._clock.mark())

    def close(self) -> None:
        pass


def observer_of(device: torch.device, clock: Clock) -> Observer:
    """Who sees reductions of tensors on `device` end."""
    return DeviceObserver(clock, device) if device.type == "cuda" else HostObserver(clock)
