"""Recorded steps as a Chrome trace, for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lightning_bucketddp.recording.reader import AlignedStep, RunRecord, align, shown_steps
from lightning_bucketddp.recording.schema import Span
from lightning_bucketddp.wording import list_some

_COMPUTE, _COMMUNICATION = 1, 2
_NUM_NAMED = 3

Event = dict[str, Any]


def make_trace(record: RunRecord) -> str:
    """Return a trace of the steps that the page shows, with one process per rank and one lane per kind of work.

    Steps are placed by the clock of the first rank; those that it did not record are left out.
    """
    steps = [align(record, number) for number in shown_steps(record) if number in record.first.steps]
    zero_s = min((step.start_s for step in steps), default=0.0)
    events = [*_names(record), *(event for step in steps for event in _step_events(record, step, zero_s))]
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
            bar = {**_bar(span, zero_s), "pid": rank, "tid": _COMPUTE}
            yield {**bar, "cat": "compute", "args": {"step": step.number}}
        for exchange in ours.exchanges():
            bar = {**_bar(exchange, zero_s), "pid": rank, "tid": _COMMUNICATION}
            yield {**bar, "cat": "weights", "args": {"step": step.number}}
        buckets = plan.buckets if plan is not None else []
        for index, (times, reduction) in enumerate(zip(ours.buckets, ours.reductions(), strict=True)):
            known: Event = {"step": step.number}
            if index < len(buckets):
                names = list_some(buckets[index].parameters, limit=_NUM_NAMED)
                known |= {"bytes": buckets[index].num_bytes, "parameters": names}
            known["ready to launch (ms)"] = round(1e3 * (times.launched_s - times.ready_s), 3)
            known["launch to start (ms)"] = round(1e3 * (reduction.start_s - times.launched_s), 3)
            bar = {**_bar(reduction, zero_s), "pid": rank, "tid": _COMMUNICATION}
            yield {**bar, "cat": "reduction", "args": known}
            # An arrow from the moment in backward when the bucket was complete.
            arrow = {"name": "ready", "cat": "ready", "id": f"{step.number}.{rank}.{index}", "pid": rank}
            yield {**arrow, "ph": "s", "tid": _COMPUTE, "ts": _us(times.ready_s - zero_s)}
            yield {**arrow, "ph": "f", "bp": "e", "tid": _COMMUNICATION, "ts": bar["ts"]}


def _bar(span: Span, zero_s: float) -> Event:
    return {"name": span.name, "ph": "X", "ts": _us(span.start_s - zero_s), "dur": _us(span.seconds)}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
