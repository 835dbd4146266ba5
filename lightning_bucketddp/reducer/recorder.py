"""What one step does when, by marks that are read some steps later: nothing here waits for a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_bucketddp.comm.collectives import Pending
from lightning_bucketddp.reducer.clock import Axis, clock_of
from lightning_bucketddp.reducer.observer import Sighting, observer_of
from lightning_bucketddp.reducer.placement import AnyBucket
from lightning_bucketddp.reducer.stats import ReducerStats
from lightning_bucketddp.reducer.wire import bytes_sent, transfer_of, was_waited_for


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
    seen: Sighting | None = None
    waited_for: Any = None

    @property
    def ends(self) -> list[Any]:
        """Marks by which it had ended; the first of them counts."""
        return [mark for mark in (None if self.seen is None else self.seen.mark, self.waited_for) if mark is not None]


@dataclass(slots=True)
class MarkedStep:
    """All that is recorded of one optimizer step.

    Attributes:
        before: the reducer's counters when it began: unused gradients and skipped ranks.
        step: the optimizer's steps before this one.
        plan: the version of the plan; 0: none.
    """

    before: tuple[int, int]
    spans: list[MarkedSpan] = field(default_factory=list)
    buckets: dict[int, MarkedBucket] = field(default_factory=dict)
    bytes_on_wire: int = 0
    step: int = 0
    plan: int = 0
    num_unused: int = 0
    num_skipped: int = 0


class StepRecorder:
    """Told by the strategy and the reducer what they do, in steps that are recorded.

    A step has one phase at a time, or none between phases. Where several backwards of a step synchronise, the
    reductions that are kept are those of the last.

    Args:
        device: where the gradients are.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._observer = observer_of(device, self._clock)
        self.axis = Axis(self._clock)
        self._phase: str | None = None
        self._since: Any = None
        self._before_waiting: str | None = None
        self._step = MarkedStep((0, 0))

    def close(self) -> None:
        """Let go of what watches."""
        self._observer.close()

    @property
    def phase(self) -> str | None:
        """What the step is doing; None: nothing that is recorded."""
        return self._phase

    def begin(self, stats: ReducerStats) -> None:
        """Another step begins: forget one that was not completed."""
        self._step = MarkedStep((stats.num_unused, stats.num_skipped))
        self.forget_phase()

    def complete(self, stats: ReducerStats, *, step: int, plan: int) -> MarkedStep:
        """The optimizer has stepped: what was recorded. The next step begins, with no phase yet."""
        self.turn_to(None)
        marked = self._step
        marked.step, marked.plan = step, plan
        # The reducer may be another one by now, which counts from 0.
        marked.num_unused = max(stats.num_unused - marked.before[0], 0)
        marked.num_skipped = max(stats.num_skipped - marked.before[1], 0)
        self.begin(stats)
        return marked

    def turn_to(self, phase: str | None) -> str | None:
        """Another phase begins; None: none does. Returns the one that ends."""
        mark = self._clock.mark()
        ends = self._phase
        if ends is not None and self._since is not None:
            self._step.spans.append(MarkedSpan(ends, self._since, mark))
        self._phase, self._since = phase, mark
        return ends

    def forget_phase(self) -> None:
        """The phase that has begun does not count, and no other begins."""
        self._phase = self._since = None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Inside, the step is in `phase`; after it, in the one before."""
        before = self.turn_to(phase)
        try:
            yield
        finally:
            self.turn_to(before)

    def see_ready(self, index: int) -> None:
        """All gradients of a bucket are there."""
        self._step.buckets[index] = MarkedBucket(self._clock.mark())

    def see_launch(self, index: int) -> None:
        """A bucket leaves, complete or not."""
        mark = self._clock.mark()
        bucket = self._step.buckets.get(index)
        if bucket is None or bucket.launched is not None:
            bucket = self._step.buckets[index] = MarkedBucket(mark)
        bucket.launched = mark

    def see_start(self, index: int, pending: Pending, bucket: AnyBucket) -> None:
        """Its reduction is under way."""
        self._step.bytes_on_wire += bytes_sent(pending, bucket)
        marks = self._step.buckets[index]
        if was_waited_for(pending):
            self._see_waiting_since(marks.launched)
            marks.seen = Sighting(self._since)
        elif (transfer := transfer_of(pending)) is not None:
            marks.seen = self._observer.watch(transfer)

    def _see_waiting_since(self, mark: Any) -> None:
        if self._phase is not None and self._since is not None:
            self._step.spans.append(MarkedSpan(self._phase, self._since, mark))
        self._since = self._clock.mark()
        self._step.spans.append(MarkedSpan("exposed", mark, self._since))

    def see_waited_for(self, index: int) -> None:
        """A reduction has ended: the step has waited for it."""
        self._step.buckets[index].waited_for = self._clock.mark()

    def begin_waiting(self) -> None:
        """Backward has ended; from now on the step waits for reductions."""
        self._before_waiting = self.turn_to("exposed")

    def end_waiting(self) -> None:
        """The gradients are final."""
        self.turn_to(self._before_waiting)

    def is_past(self, marked: MarkedStep) -> bool:
        """Whether the device has come to all marks of a step."""
        last = [span.end for span in marked.spans[-1:]]
        return all(
            self._clock.is_past(mark) for mark in last + [end for b in marked.buckets.values() for end in b.ends]
        )
