"""What one step does when, by marks that are read some steps later: nothing here waits for a device.

Note: ends of reductions
    On a GPU a stream beside the others waits for each reduction, and a mark is made on it. On a CPU a thread does the
    same: it waits inside gloo, without the interpreter, and looks at the clock when it is woken. Not a callback of the
    reduction's future: it would run in one of gloo's few threads and need the interpreter, so that the next reduction
    waits for the training thread, and for ever where that thread waits for the end of the process group.

    The thread may be woken late on a busy machine. But the step itself waits for all reductions in order, so each has
    ended when that wait is over; whatever was seen first counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_bucketddp.comm.collectives import Pending
from lightning_bucketddp.comm.worker import Worker
from lightning_bucketddp.reducer.graphs import is_being_captured
from lightning_bucketddp.reducer.observer import Axis, BackwardObserver, ReducerStats, clock_of
from lightning_bucketddp.reducer.reduction import PendingReduction

_ENDS_WITHIN_S = 1.0


@dataclass(slots=True)
class MarkedSpan:
    """A phase of a step, from mark to mark."""

    name: str
    start: Any
    end: Any


@dataclass(slots=True)
class MarkedTransfer:
    """The marks of one reduction, or of one exchange of weights; None: not yet."""

    ready: Any = None
    launched: Any = None
    seen: Any = None  # to end (Note: ends of reductions)
    waited_for: Any = None
    num_bytes: int = 0
    bucket: int = -1  # of weights: its index in the plan of the step, or -1 if it has none

    @property
    def ends(self) -> list[Any]:
        """Return marks by which it had ended; the first of them counts."""
        return [mark for mark in (self.seen, self.waited_for) if mark is not None]


@dataclass(slots=True)
class MarkedStep:
    """All that is recorded of one optimizer step."""

    before: tuple[int, int]  # the reducer's counters when it began: unused gradients and skipped ranks
    spans: list[MarkedSpan] = field(default_factory=list)
    buckets: dict[int, MarkedTransfer] = field(default_factory=dict)
    # Exchanges of the weights that it has changed (`shard_optimizer`), by the `id` of their bucket.
    gathers: dict[int, MarkedTransfer] = field(default_factory=dict)
    bytes_on_wire: int = 0
    step: int = 0  # the optimizer's steps before this one
    plan: int = 0  # its version; 0: none
    num_unused: int = 0
    num_skipped: int = 0


class StepRecorder(BackwardObserver):
    """Records what the strategy and the reducer do in a step, which has one phase at a time, or none.

    Where several backwards of a step synchronise, the reductions that are kept are those of the last.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = clock_of(device)
        self._worker = Worker("bucketddp-observer") if device.type != "cuda" else None
        self._stream = torch.cuda.Stream(device) if self._worker is None else None  # type: ignore[no-untyped-call]
        self.axis = Axis(self._clock)
        self._phase: str | None = None
        self._since: Any = None
        self._before_waiting: str | None = None
        self._before_weights: str | None = None
        self._step = MarkedStep((0, 0))

    def close(self) -> None:
        if self._worker is not None:
            # It may wait for a rank that is gone; then it ends with the process.
            futures.wait([self._worker.submit(lambda: None)], timeout=_ENDS_WITHIN_S)
            self._worker.close()

    def _watch(self, transfer: Pending, marks: MarkedTransfer) -> None:
        """Mark the end of `transfer` as soon as it comes (Note: ends of reductions)."""

        def wait() -> None:
            with suppress(Exception):  # the step waits for it, too, and is the one to raise
                transfer.wait()
                marks.seen = self._clock.mark()

        if self._worker is not None:
            self._worker.submit(wait)
        elif os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") == "0":  # else it is the host that would wait
            with torch.cuda.stream(self._stream):
                transfer.wait()
                marks.seen = self._clock.mark()

    @property
    def phase(self) -> str | None:
        return self._phase

    def begin(self, stats: ReducerStats) -> None:
        """Begin another step; forget one that was not completed."""
        self._step = MarkedStep((stats.num_unused, stats.num_skipped))
        self.forget_phase()

    def complete(self, stats: ReducerStats, *, step: int, plan: int, buckets: Sequence[object] = ()) -> MarkedStep:
        """Return what was recorded when the optimizer has stepped, with these `buckets`. The next step begins."""
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
        self._step.buckets[index] = MarkedTransfer(self._clock.mark())

    def bucket_launched(self, index: int) -> None:
        mark = self._clock.mark()
        bucket = self._step.buckets.get(index)
        if bucket is None or bucket.launched is not None:
            bucket = self._step.buckets[index] = MarkedTransfer(mark)
        bucket.launched = mark

    def reduction_started(self, index: int, pending: PendingReduction) -> None:
        self._step.bytes_on_wire += pending.bytes_sent
        marks = self._step.buckets[index]
        if pending.has_ended:  # the launch was the wait
            if self._phase is not None and self._since is not None:
                self._step.spans.append(MarkedSpan(self._phase, self._since, marks.launched))
            marks.seen = self._since = self._clock.mark()
            self._step.spans.append(MarkedSpan("exposed", marks.launched, self._since))
        elif pending.transfer is not None:
            self._watch(pending.transfer, marks)

    def backward_ended(self) -> None:
        self._before_waiting = self.turn_to("exposed")

    def reduction_ended(self, index: int) -> None:
        self._step.buckets[index].waited_for = self._clock.mark()

    def gradients_final(self) -> None:
        self.turn_to(self._before_waiting)

    def gather_started(self, bucket: object, transfer: Pending, num_bytes: int) -> None:
        if not is_being_captured(self._device):
            marks = self._step.gathers[id(bucket)] = MarkedTransfer(launched=self._clock.mark(), num_bytes=num_bytes)
            self._watch(transfer, marks)

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
        transfers = (*marked.buckets.values(), *marked.gathers.values())
        marks = [span.end for span in marked.spans[-1:]] + [end for transfer in transfers for end in transfer.ends]
        return all(map(self._clock.is_past, marks))
