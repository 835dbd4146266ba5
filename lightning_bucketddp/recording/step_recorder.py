"""What one step does when, by marks that are read some steps later: nothing here waits for a device.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from lightning_bucketddp.comm.collectives import Pending
from lightning_bucketddp.reducer.graphs import is_being_captured
from lightning_bucketddp.reducer.observer import Axis, BackwardObserver, Clock, ReducerStats, clock_of
from lightning_bucketddp.reducer.reduction import PendingReduction

_ENDS_WITHIN_S = 1.0


@dataclass(slots=True)
class Completion:
    """The mark at which something was seen to end; None: it was not, so far."""

    mark: Any = None


class CompletionWatcher(Protocol):
    """Sees reductions end (Note: ends of reductions)."""

    def watch(self, transfer: Pending) -> Completion:
        """Mark the end of `transfer` as soon as it comes."""

    def close(self) -> None:
        """Watch nothing any more."""


class HostWatcher:
    """A thread that waits for one reduction after the other, in the order in which they run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._to_watch: SimpleQueue[tuple[Pending, Completion] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bucketddp-observer", daemon=True)
        self._thread.start()

    def watch(self, transfer: Pending) -> Completion:
        completion = Completion()
        self._to_watch.put((transfer, completion))
        return completion

    def close(self) -> None:
        self._to_watch.put(None)
        # It may wait for a rank that is gone; then it ends with the process.
        self._thread.join(timeout=_ENDS_WITHIN_S)

    def _run(self) -> None:
        while (watched := self._to_watch.get()) is not None:
            transfer, completion = watched
            with suppress(Exception):  # the step waits for it, too, and is the one to raise
                transfer.wait()
                completion.mark = self._clock.mark()
            del watched, transfer  # gradients hang on it


class DeviceWatcher:
    """A stream that waits for each reduction."""

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self._clock = clock
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # With this setting of torch's it is the host that waits.
        self._is_blind = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") != "0"

    def watch(self, transfer: Pending) -> Completion:
        if self._is_blind:
            return Completion()
        with torch.cuda.stream(self._stream):
            transfer.wait()
            return Completion(self._clock.mark())

    def close(self) -> None:
        pass


def completion_watcher(device: torch.device, clock: Clock) -> CompletionWatcher:
    """Return what sees reductions of tensors on `device` end."""
    return DeviceWatcher(clock, device) if device.type == "cuda" else HostWatcher(clock)


@dataclass(slots=True)
class MarkedSpan:
    """A phase of a step, from mark to mark."""

    name: str
    start: Any
    end: Any


@dataclass(slots=True)
class MarkedBucket:
    """The marks of one reduction; what has ended was seen to, or waited for, or both."""

    ready: Any
    launched: Any = None
    seen: Completion | None = None
    waited_for: Any = None

    @property
    def ends(self) -> list[Any]:
        """Marks by which it had ended; the first of them counts."""
        return [mark for mark in (None if self.seen is None else self.seen.mark, self.waited_for) if mark is not None]


@dataclass(slots=True)
class MarkedGather:
    """The marks of one exchange of weights; `bucket` is its index in the plan of the step, or -1 if it has none."""

    started: Any
    seen: Completion
    num_bytes: int
    waited_for: Any = None
    bucket: int = -1

    @property
    def ends(self) -> list[Any]:
        """Marks by which it had ended; the first of them counts."""
        return [mark for mark in (self.seen.mark, self.waited_for) if mark is not None]


@dataclass(slots=True)
class MarkedStep:
    """All that is recorded of one optimizer step.

    Attributes:
        before: the reducer's counters when it began: unused gradients and skipped ranks.
        gathers: exchanges of the weights that it has changed (`shard_optimizer`), by the `id` of their bucket.
        step: the optimizer's steps before this one.
        plan: the version of the plan; 0: none.
    """

    before: tuple[int, int]
    spans: list[MarkedSpan] = field(default_factory=list)
    buckets: dict[int, MarkedBucket] = field(default_factory=dict)
    gathers: dict[int, MarkedGather] = field(default_factory=dict)
    bytes_on_wire: int = 0
    step: int = 0
    plan: int = 0
    num_unused: int = 0
    num_skipped: int = 0


class StepRecorder(BackwardObserver):
    """Told by the strategy and the reducer what they do, in steps that are recorded.

    A step has one phase at a time, or none between phases. Where several backwards of a step synchronise, the
    reductions that are kept are those of the last.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = clock_of(device)
        self._watcher = completion_watcher(device, self._clock)
        self.axis = Axis(self._clock)
        self._phase: str | None = None
        self._since: Any = None
        self._before_waiting: str | None = None
        self._before_weights: str | None = None
        self._step = MarkedStep((0, 0))

    def close(self) -> None:
        """Let go of what watches."""
        self._watcher.close()

    @property
    def phase(self) -> str | None:
        """What the step is doing; None: nothing that is recorded."""
        return self._phase

    def begin(self, stats: ReducerStats) -> None:
        """Begin another step; forget one that was not completed."""
        self._step = MarkedStep((stats.num_unused, stats.num_skipped))
        self.forget_phase()

    def complete(self, stats: ReducerStats, *, step: int, plan: int, buckets: Sequence[object] = ()) -> MarkedStep:
        """Return what was recorded, when the optimizer has stepped. The next step begins, with no phase yet.

        Args:
            step: the optimizer's steps before this one.
            plan: the version of the plan; 0: none.
            buckets: those of the plan.
        """
        self.turn_to(None)
        marked = self._step
        marked.step, marked.plan = step, plan
        for index, bucket in enumerate(buckets):
            if id(bucket) in marked.gathers:
                marked.gathers[id(bucket)].bucket = index
        # The reducer may be another one by now, which counts from 0.
        marked.num_unused = max(stats.num_unused - marked.before[0], 0)
        marked.num_skipped = max(stats.num_skipped - marked.before[1], 0)
        self.begin(stats)
        return marked

    def turn_to(self, phase: str | None) -> str | None:
        """Begin another phase (None: none) and return the one that ends."""
        mark = self._clock.mark()
        ends = self._phase
        if ends is not None and self._since is not None:
            self._step.spans.append(MarkedSpan(ends, self._since, mark))
        self._phase, self._since = phase, mark
        return ends

    def forget_phase(self) -> None:
        """Drop the phase that has begun, and begin no other."""
        self._phase = self._since = None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in `phase` inside, and afterwards in the phase before."""
        before = self.turn_to(phase)
        try:
            yield
        finally:
            self.turn_to(before)

    def bucket_ready(self, index: int) -> None:
        self._step.buckets[index] = MarkedBucket(self._clock.mark())

    def bucket_launched(self, index: int) -> None:
        mark = self._clock.mark()
        bucket = self._step.buckets.get(index)
        if bucket is None or bucket.launched is not None:
            bucket = self._step.buckets[index] = MarkedBucket(mark)
        bucket.launched = mark

    def reduction_started(self, index: int, pending: PendingReduction) -> None:
        self._step.bytes_on_wire += pending.bytes_sent
        marks = self._step.buckets[index]
        if pending.has_ended:
            self._see_waiting_since(marks.launched)
            marks.seen = Completion(self._since)
        elif pending.transfer is not None:
            marks.seen = self._watcher.watch(pending.transfer)

    def _see_waiting_since(self, mark: Any) -> None:
        if self._phase is not None and self._since is not None:
            self._step.spans.append(MarkedSpan(self._phase, self._since, mark))
        self._since = self._clock.mark()
        self._step.spans.append(MarkedSpan("exposed", mark, self._since))

    def backward_ended(self) -> None:
        self._before_waiting = self.turn_to("exposed")

    def reduction_ended(self, index: int) -> None:
        self._step.buckets[index].waited_for = self._clock.mark()

    def gradients_final(self) -> None:
        self.turn_to(self._before_waiting)

    def gather_started(self, bucket: object, transfer: Pending, num_bytes: int) -> None:
        if not is_being_captured(self._device):
            mark = self._clock.mark()
            self._step.gathers[id(bucket)] = MarkedGather(mark, self._watcher.watch(transfer), num_bytes)

    def gather_awaited(self, bucket: object) -> None:
        self._before_weights = self._phase
        if self._phase is not None and not is_being_captured(self._device):
            self.turn_to("weights")

    def gather_ended(self, bucket: object) -> None:
        if is_being_captured(self._device):
            return
        if self._before_weights is not None:
            self.turn_to(self._before_weights)
        self._step.gathers[id(bucket)].waited_for = self._clock.mark()

    def is_past(self, marked: MarkedStep) -> bool:
        """Return whether the device has reached all marks of a step."""
        marks = [span.end for span in marked.spans[-1:]]
        marks += [end for bucket in marked.buckets.values() for end in bucket.ends]
        marks += [end for gather in marked.gathers.values() for end in gather.ends]
        return all(self._clock.is_past(mark) for mark in marks)
