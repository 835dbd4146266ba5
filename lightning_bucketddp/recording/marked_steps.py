"""Recorded steps from marks, and numbers from recorded steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_bucketddp.config import MIB
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec
from lightning_bucketddp.recording.record import BucketTimes, RecordedBucket, RecordedPlan, Span, Step
from lightning_bucketddp.reducer.clock import Axis
from lightning_bucketddp.reducer.step_recorder import MarkedStep


def step_of(marked: MarkedStep, axis: Axis, *, memory_bytes: int) -> Step | None:
    """A step in seconds; None: a backward of it did not come to its end. Waits for marks that are not past."""
    launched = {
        index: bucket for index, bucket in marked.buckets.items() if bucket.launched is not None and bucket.ends
    }
    if not marked.spans or len(launched) < len(marked.buckets):
        return None
    axis.move_to(marked.spans[0].start)
    buckets: list[BucketTimes] = []
    for _, bucket in sorted(launched.items()):
        ready_s, launched_s = axis.seconds(bucket.ready), axis.seconds(bucket.launched)
        buckets.append(BucketTimes(ready_s, launched_s, max(min(map(axis.seconds, bucket.ends)), launched_s)))
    return Step(
        step=marked.step,
        plan=marked.plan,
        spans=[Span(span.name, axis.seconds(span.start), axis.seconds(span.end)) for span in marked.spans],
        buckets=buckets,
        bytes_on_wire=marked.bytes_on_wire,
        num_unused=marked.num_unused,
        num_skipped=marked.num_skipped,
        memory_bytes=memory_bytes,
    )


def plan_of(version: int, buckets: Sequence[BucketSpec], specs: Sequence[ParameterSpec]) -> RecordedPlan:
    """A plan as it is written down; `specs` are those of all parameters."""
    return RecordedPlan(
        version,
        [
            RecordedBucket(
                [specs[i].name for i in bucket.members], [specs[i].num_bytes for i in bucket.members], bucket.sparse
            )
            for bucket in buckets
        ],
    )


def seconds_of(step: Step) -> float:
    """How long a step took, without what happened between its phases: validation, checkpoints, other callbacks."""
    return sum(span.seconds for span in step.spans)


def bandwidth_of(step: Step, *, num_ranks: int) -> float:
    """Bytes per second that each rank's link has carried while reductions ran (Note: cost of an all-reduce)."""
    share, communication_s = 2 * (num_ranks - 1) / num_ranks, step.communication_s
    return share * step.bytes_on_wire / communication_s if communication_s > 0 else 0.0


def metrics_of(steps: Sequence[Step], *, num_ranks: int) -> dict[str, float]:
    """What is logged of `steps`: their means."""

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(steps)

    return {
        "step_ms": 1e3 * mean(seconds_of(step) for step in steps),
        "communication_ms": 1e3 * mean(step.communication_s for step in steps),
        "exposed_ms": 1e3 * mean(step.exposed_s for step in steps),
        "overlap_pct": 100 * mean(step.overlap for step in steps),
        "mb_on_wire": mean(step.bytes_on_wire for step in steps) / MIB,
        "bandwidth_gbit_s": mean(bandwidth_of(step, num_ranks=num_ranks) for step in steps) * 8 / 1e9,
        "buckets": mean(len(step.buckets) for step in steps),
        "unused_parameters": mean(step.num_unused for step in steps),
        "skipped_ranks": mean(step.num_skipped for step in steps),
        "plan_version": float(steps[-1].plan),
    }
