"""Observe a step: counters, what the step recorder is notified of, torch's profiler, and clocks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp.comm.collectives import Pending
from lightning_bucketddp.config import MIB, ReducerConfig
from lightning_bucketddp.reducer.reduction import PendingReduction


@dataclass(frozen=True, slots=True)
class OuterStepStats:
    """An exchange of weights between islands."""

    step: int  # how many the optimizers had taken
    seconds: float  # with the time that the islands waited for each other
    num_bytes: int  # sent by this rank


@dataclass(slots=True)
class ReducerStats:
    """Counters since the first reducer of a fit was made."""

    num_backwards: int = 0  # synchronised ones
    num_reductions: int = 0  # buckets reduced in them
    bytes_sent: int = 0  # that travelled for them, as `reduce_dtype` (Note: halves, in `cost`)
    num_plans: int = 0  # one for each set of trainable parameters, and if a better one was computed
    num_unused: int = 0  # gradients that were missing on this rank and filled in with zeros
    num_skipped: int = 0  # training steps that returned nothing, on all ranks together
    num_replayed: int = 0  # backwards that a CUDA graph has repeated
    num_nonfinite: int = 0  # backwards in which a loss or a gradient was infinite or nan on some rank
    outer_steps: list[OuterStepStats] = field(default_factory=list)  # with `local_steps`

    @property
    def num_outer_steps(self) -> int:
        return len(self.outer_steps)

    @property
    def outer_bytes(self) -> int:
        return sum(one.num_bytes for one in self.outer_steps)


NOTHING = nullcontext()


class BackwardObserver:
    """Is notified of what a synchronised backward does, in this order, and of weights after it; this does nothing."""

    def backward_began(self) -> None: ...
    def bucket_ready(self, index: int) -> None: ...  # all gradients of the bucket are there
    def bucket_launched(self, index: int) -> None: ...  # it leaves, complete or not
    def reduction_started(self, index: int, pending: PendingReduction) -> None: ...
    def backward_ended(self) -> None: ...  # on this rank: from now on the step waits for reductions
    def reduction_ended(self, index: int) -> None: ...  # the step has waited for it
    def gradients_final(self) -> None: ...

    # The ranks exchange the weights of a bucket, of which each has stepped its shard.
    def gather_started(self, bucket: object, transfer: Pending, num_bytes: int) -> None: ...
    def gather_awaited(self, bucket: object) -> None: ...
    def gather_ended(self, bucket: object) -> None: ...


NO_OBSERVER = BackwardObserver()


def profiler_span(name: str) -> AbstractContextManager[Any]:
    """Show what happens inside as `name` in torch's profiler. Costs nothing while none runs."""
    return record_function(name) if _profiler_enabled() else NOTHING


class Clock:
    """Measures the time between marks: that of this process."""

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, start: Any, stop: Any) -> float:
        """Return the time from one mark to another. May wait until the device has reached both."""
        return float(stop - start)

    def on_host(self, mark: Any) -> float:
        """Return `mark` in seconds of `time.perf_counter`. Waits for the device."""
        return float(mark)

    def is_past(self, mark: Any) -> bool:
        """Return whether `mark` can be read without waiting."""
        return True

    def wait(self, mark: Any) -> float | None:
        """Wait for `mark`; return for how many seconds, or None where the host does all of the work itself."""
        return None

    def times(self, action: Callable[[], object], *, number: int) -> list[float]:
        """Return how long `action` takes, `number` times, after once more that waits for the other ranks."""
        marks = []
        for _ in range(1 + number):
            start = self.mark()
            action()
            marks.append((start, self.mark()))
        return [self.seconds(start, stop) for start, stop in marks[1:]]


class DeviceClock(Clock):
    """Measures when a GPU reaches marks in the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        start.synchronize()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    def on_host(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return time.perf_counter()

    def is_past(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def wait(self, mark: torch.cuda.Event) -> float:
        started = time.perf_counter()
        mark.synchronize()
        return time.perf_counter() - started


def clock_of(device: torch.device) -> Clock:
    """Return the clock for what happens on `device`."""
    return DeviceClock() if device.type == "cuda" else Clock()


class Axis:
    """Marks of a clock as seconds of `time.perf_counter`. Waits for the device once, when it is made."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._origin = clock.mark()
        self._origin_s = clock.on_host(self._origin)

    def move_to(self, mark: Any) -> None:
        """Count from `mark` from now on: between distant marks a GPU measures time with few digits."""
        self._origin_s = self.seconds(mark)
        self._origin = mark

    def seconds(self, mark: Any) -> float:
        return self._origin_s + self._clock.seconds(self._origin, mark)


def is_being_captured(device: torch.device) -> bool:
    """Return whether work for `device` is captured now, instead of run.

    It is replayed later, without Python. So the plan does not change meanwhile, nothing is read back, and no event is
    recorded for the host.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as one that dynamo does not compile; where it is not loaded, nothing is compiled so far."""
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function  # type: ignore[no-untyped-call]


# dynamo's first graph has this size, and it refuses a smaller one for the others.
_SMALLEST_GRAPH_BYTES = 1 * MIB


@dataclass(frozen=True, slots=True)
class _ForwardRunning:
    """What dynamo reads of a `DistributedDataParallel`: whether it is active, and the size of the partial graphs."""

    bucket_bytes_cap: int

    def __bool__(self) -> bool:
        # A graph without a backward (a teacher, an evaluation) is faster as a whole.
        return torch.is_grad_enabled()


@contextmanager
def graphs_split(config: ReducerConfig, *, world_size: int) -> Iterator[None]:
    """Split graphs that are compiled inside, so that their gradients arrive one graph after the other.

    A compiled graph returns all its gradients when its backward ends, which leaves nothing to overlap with. With
    `torch._dynamo.config.optimize_ddp` dynamo splits it while a `DistributedDataParallel` runs its forward: we stand in
    for that.
    """
    if world_size == 1 or not config.overlap:
        yield
        return
    cap = max(config.caps.by_position[-1], _SMALLEST_GRAPH_BYTES)
    before = DistributedDataParallel._active_ddp_module
    DistributedDataParallel._active_ddp_module = _ForwardRunning(cap)  # type: ignore[assignment]
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = before
