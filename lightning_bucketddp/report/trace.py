"""The recorded steps as a Chrome trace, which Perfetto shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lightning_bucketddp.report.aligned import AlignedStep, align, shown_steps
from lightning_bucketddp.report.record import BucketTimes, RecordedBucket, Span
from lightning_bucketddp.report.run_files import RunRecord

_COMPUTE, _COMMUNICATION = 1, 2
_NUM_NAMED = 3

Event = dict[str, Any]


def make_trace(record: RunRecord) -> str:
    """The trace of the steps that the page shows, too: a process for each rank, with a lane for each kind of work."""
    steps = [align(record, number) for number in shown_steps(record)]
    zero_s = min(step.start_s for step in steps)
    events = [
        *_names(record),
        *(event for step in steps for event in _step_events(record, step, zero_s)),
    ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def _names(record: RunRecord) -> Iterator[Event]:
    for rank, ours in record.ranks.items():
        process = {"ph": "M", "pid": rank}
        yield {**process, "name": "process_name", "args": {"name": f"rank {rank} ({ours.run.host})"}}
        yield {**process, "name": "process_sort_index", "args": {"sort_index": rank}}
        for lane, name in ((_COMPUTE, "compute"), (_COMMUNICATION, "communication")):
            yield {**process, "tid": lane, "name": "thread_name", "args": {"name": name}}
            yield {**process, "tid": lane, "name": "thread_sort_index", "args": {"sort_index": lane}}


def _step_events(record: RunRecord, step: AlignedStep, zero_s: float) -> Iterator[Event]:
    plan = record.first.plans.get(step.plan)
    for rank, ours in step.ranks.items():
        for span in ours.spans:
            yield {
                **_bar(span.name, span.start_s - zero_s, span.end_s - zero_s),
                **{"pid": rank, "tid": _COMPUTE, "cat": "compute", "args": {"step": step.number}},
            }
        buckets = plan.buckets if plan is not None else []
        for index, reduction in enumerate(ours.reductions()):
            known = {"step": step.number, **(_describe(buckets[index]) if index < len(buckets) else {})}
            for event in _bucket_events(ours.buckets[index], reduction, known=known, zero_s=zero_s):
                yield {**event, "pid": rank, "id": f"{step.number}.{rank}.{index}"}


def _bucket_events(times: BucketTimes, reduction: Span, *, known: Event, zero_s: float) -> Iterator[Event]:
    arguments = {
        **known,
        "ready to launch (ms)": round(1e3 * (times.launched_s - times.ready_s), 3),
        "launch to start (ms)": round(1e3 * (reduction.start_s - times.launched_s), 3),
    }
    yield {
        **_bar(reduction.name, reduction.start_s - zero_s, reduction.end_s - zero_s),
        **{"tid": _COMMUNICATION, "cat": "reduction", "args": arguments},
    }
    # An arrow from the moment in backward at which the bucket was complete.
    flow = {"name": "ready", "cat": "ready"}
    yield {**flow, "ph": "s", "tid": _COMPUTE, "ts": _us(times.ready_s - zero_s)}
    yield {**flow, "ph": "f", "bp": "e", "tid": _COMMUNICATION, "ts": _us(reduction.start_s - zero_s)}


def _describe(bucket: RecordedBucket) -> Event:
    more = len(bucket.parameters) - _NUM_NAMED
    names = ", ".join(bucket.parameters[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
    return {"bytes": bucket.num_bytes, "parameters": names}


def _bar(name: str, start_s: float, end_s: float) -> Event:
    return {"name": name, "ph": "X", "ts": _us(start_s), "dur": _us(end_s - start_s)}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
