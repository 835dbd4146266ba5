"""Turn recorded steps into lines and metrics, and write the file of a rank.

Note: ends of reductions
    On a GPU a separate stream waits for each reduction, and a mark is made on it. On a CPU a thread does the same: it
    waits inside gloo, without the interpreter, and reads the clock when it is woken. A callback of the reduction's
    future would run in one of gloo's few threads and need the interpreter: the next reduction would wait for the
    training thread, and for ever where that thread waits for the end of the process group.

    The thread may be woken late on a busy machine. But the step itself waits for all reductions in order, so each has
    ended when that wait is over; the earlier of the two marks counts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

import torch

from lightning_bucketddp.comm.collectives import Pending
from lightning_bucketddp.config import MIB
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec
from lightning_bucketddp.processes import Worker
from lightning_bucketddp.recording.schema import (
    ALL_REDUCE,
    BucketTimes,
    GatherTimes,
    Line,
    RecordedBucket,
    RecordedPlan,
    Span,
    Step,
    bandwidth_of,
    path_of,
    write,
)
from lightning_bucketddp.reducer.observer import Axis, BackwardObserver, ReducerStats, clock_of, is_being_captured
from lightning_bucketddp.reducer.reduction import PendingReduction
from lightning_bucketddp.wording import wrap

log = logging.getLogger(__name__)


@dataclass(slots=True)
class MarkedTransfer:
    """The marks of one reduction, or of one exchange of weights; None: not yet."""

    ready: Any = None
    launched: Any = None
    ends: list[Any] = field(default_factory=list)  # by each the transfer had ended (Note: ends of reductions)
    num_bytes: int = 0
    bucket: int = -1  # of weights: its index in the plan of the step, or -1 if it has none


@dataclass(slots=True)
class MarkedStep:
    """The record of one optimizer step, whose times are marks of a clock until `step_of` converts them."""

    spans: list[Span] = field(default_factory=list)
    buckets: dict[int, MarkedTransfer] = field(default_factory=dict)
    # Exchanges of the weights that it has changed (`shard_optimizer`), by the `id` of their bucket.
    gathers: dict[int, MarkedTransfer] = field(default_factory=dict)
    bytes_on_wire: int = 0
    step: int = 0  # the optimizer's steps before this one
    plan: int = 0  # its version; 0: none
    counts: dict[str, int] = field(default_factory=dict)  # those of `_counters`
    lag_s: float | None = None


def _counters(stats: ReducerStats) -> dict[str, int]:
    return {name: getattr(stats, name) for name in ("num_unused", "num_skipped", "num_replayed")}


class StepRecorder(BackwardObserver):
    """Records the phases and the reductions of a step, which is in one phase at a time, or in none.

    Where several backwards of a step synchronise, the reductions of the last one are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = clock_of(device)
        self._worker = Worker("bucketddp-observer", stops_at_error=False) if device.type != "cuda" else None
        self._stream = torch.cuda.Stream(device) if self._worker is None else None  # type: ignore[no-untyped-call]
        self.axis = Axis(self._clock)
        self.phase: str | None = None
        self._since: Any = None
        self._before_waiting: str | None = None
        self._before_weights: str | None = None
        self._step = MarkedStep()
        self._counters_before: dict[str, int] = {}
        # Whether the step waits for the device when backward ends, to measure how far it is behind the host.
        self.measures_lag = False

    def close(self) -> None:
        if self._worker is not None:
            # It may wait for a rank that is gone; then it ends with the process.
            futures.wait([self._worker.submit(lambda: None)], timeout=1.0)
            self._worker.close()

    def _watch(self, transfer: Pending, marks: MarkedTransfer) -> None:
        """Mark the end of `transfer` as soon as it comes (Note: ends of reductions)."""

        def mark_end() -> None:
            transfer.wait()
            marks.ends.append(self._clock.mark())

        if self._worker is not None:
            self._worker.submit(mark_end)  # the step waits for the transfer, too, and is the one to raise
        elif os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") == "0":  # otherwise the host would wait
            with torch.cuda.stream(self._stream):
                mark_end()

    def begin(self, stats: ReducerStats) -> None:
        """Begin another step; forget one that was not completed."""
        self._step, self._counters_before = MarkedStep(), _counters(stats)
        self.forget_phase()

    def complete(self, stats: ReducerStats, *, step: int, plan: int, buckets: Sequence[object] = ()) -> MarkedStep:
        """Return the record when the optimizer has stepped, with these `buckets`. The next step begins."""
        self.turn_to(None)
        marked = self._step
        marked.step, marked.plan = step, plan
        for index, bucket in enumerate(buckets):
            if id(bucket) in marked.gathers:
                marked.gathers[id(bucket)].bucket = index
        # The reducer may be another one by now, which counts from 0.
        before = self._counters_before
        marked.counts = {name: max(now - before.get(name, 0), 0) for name, now in _counters(stats).items()}
        self.begin(stats)
        return marked

    def turn_to(self, phase: str | None) -> str | None:
        """Begin another phase (None: none) and return the one that ends."""
        mark = self._clock.mark()
        ends = self.phase
        if ends is not None and self._since is not None:
            self._step.spans.append(Span(ends, self._since, mark))
        if ends == "backward" and self.measures_lag and not is_being_captured(self._device):
            # Only once in a step: after the first end of a backward the device waits for other ranks.
            self.measures_lag, self._step.lag_s = False, self._clock.wait(mark)
        self.phase, self._since = phase, mark
        return ends

    def forget_phase(self) -> None:
        """Drop the phase that has begun, and begin no other."""
        self.phase = self._since = None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record `phase` inside, and afterwards the phase before."""
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
            if self.phase is not None and self._since is not None:
                self._step.spans.append(Span(self.phase, self._since, marks.launched))
            self._since = self._clock.mark()
            marks.ends.append(self._since)
            self._step.spans.append(Span("exposed", marks.launched, self._since))
        elif pending.transfer is not None:
            self._watch(pending.transfer, marks)

    def backward_ended(self) -> None:
        self._before_waiting = self.turn_to("exposed")

    def reduction_ended(self, index: int) -> None:
        self._step.buckets[index].ends.append(self._clock.mark())

    def gradients_final(self) -> None:
        self.turn_to(self._before_waiting)

    def gather_started(self, bucket: object, transfer: Pending, num_bytes: int) -> None:
        if not is_being_captured(self._device):
            marks = self._step.gathers[id(bucket)] = MarkedTransfer(launched=self._clock.mark(), num_bytes=num_bytes)
            self._watch(transfer, marks)

    def gather_awaited(self, bucket: object) -> None:
        self._before_weights = self.phase
        if self.phase is not None and not is_being_captured(self._device):
            self.turn_to("weights")

    def gather_ended(self, bucket: object) -> None:
        if is_being_captured(self._device):
            return
        if self._before_weights is not None:
            self.turn_to(self._before_weights)
        self._step.gathers[id(bucket)].ends.append(self._clock.mark())

    def is_past(self, marked: MarkedStep) -> bool:
        """Return whether the device has reached all marks of a step."""
        transfers = (*marked.buckets.values(), *marked.gathers.values())
        marks = [span.end_s for span in marked.spans[-1:]] + [end for transfer in transfers for end in transfer.ends]
        return all(map(self._clock.is_past, marks))


def step_of(marked: MarkedStep, axis: Axis, *, memory_bytes: int) -> Step | None:
    """Convert a marked step to seconds, waiting for marks still pending; None if a backward of it did not end."""
    if not marked.spans or any(bucket.launched is None or not bucket.ends for bucket in marked.buckets.values()):
        return None
    gathers = [gather for gather in marked.gathers.values() if gather.ends]
    axis.move_to(marked.spans[0].start_s)
    buckets: list[BucketTimes] = []
    for _, bucket in sorted(marked.buckets.items()):
        ready_s, launched_s = axis.seconds(bucket.ready), axis.seconds(bucket.launched)
        buckets.append(BucketTimes(ready_s, launched_s, max(min(map(axis.seconds, bucket.ends)), launched_s)))
    return Step(
        marked.step,
        marked.plan,
        [Span(span.name, axis.seconds(span.start_s), axis.seconds(span.end_s)) for span in marked.spans],
        buckets,
        marked.bytes_on_wire + sum(gather.num_bytes for gather in gathers) // 2,
        **marked.counts,
        lag_s=marked.lag_s,
        memory_bytes=memory_bytes,
        gathers=[GatherTimes(g.bucket, axis.seconds(g.launched), min(map(axis.seconds, g.ends))) for g in gathers],
    )


def plan_of(
    version: int, buckets: Sequence[BucketSpec], specs: Sequence[ParameterSpec], *, scatters: bool = False
) -> RecordedPlan:
    """Return the line for a plan; with `scatters` each rank gets the gradients of its shard only."""
    recorded = []
    for bucket in buckets:
        names, sizes = [specs[i].name for i in bucket.members], [specs[i].num_bytes for i in bucket.members]
        collective = ALL_REDUCE
        if bucket.sharded is not None and scatters:
            collective = "reduce-scatter" if bucket.sharded.owner is None else "reduce"
        recorded.append(RecordedBucket(names, sizes, bucket.sparse, bucket.sharded is not None, collective))
    return RecordedPlan(version, recorded)


def metrics_of(steps: Sequence[Step], *, num_ranks: int) -> dict[str, float]:
    """Return the metrics to log: means over `steps`."""
    bandwidths = (bandwidth_of(step.bytes_on_wire, step.communication_s, num_ranks=num_ranks) for step in steps)
    return {
        "step_ms": 1e3 * fmean(step.step_s for step in steps),
        "communication_ms": 1e3 * fmean(step.communication_s for step in steps),
        "exposed_ms": 1e3 * fmean(step.exposed_s for step in steps),
        "overlap_pct": 100 * fmean(step.overlap for step in steps),
        "mb_on_wire": fmean(step.bytes_on_wire for step in steps) / MIB,
        "bandwidth_gbit_s": 8e-9 * fmean(bandwidths),
        "buckets": fmean(len(step.buckets) for step in steps),
        "unused_parameters": fmean(step.num_unused for step in steps),
        "skipped_batches_per_step": fmean(step.num_skipped for step in steps),
        "plan_version": float(steps[-1].plan),
    }


class RecordFile:
    """The file of one rank in one fit, or none without a `folder`; replaces the file of an earlier fit.

    If it cannot be written, it warns once, and training goes on.
    """

    def __init__(self, folder: Path | None, *, rank: int) -> None:
        self._file: TextIO | None = None
        if folder is None:
            return
        self._path = path_of(folder, rank)
        self._rank = rank
        with self._giving_up_on_errors():
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")

    def write(self, line: Line) -> None:
        if self._file is not None:
            with self._giving_up_on_errors():
                write(line, self._file)

    def close(self) -> None:
        if self._file is not None:
            with self._giving_up_on_errors():
                self._file.close()
        self._file = None

    @contextmanager
    def _giving_up_on_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            text = f"bucketddp: rank {self._rank} cannot record its steps in `{self._path}` ({error})."
            remedy = "Pass another `dirpath` to `BucketDDPMonitor`."
            log.warning(wrap(f"{text} Training goes on, without a record from here. {remedy}"))
            file, self._file = self._file, None
            if file is not None:
                with suppress(OSError):  # closing flushes, which may fail again
                    file.close()
