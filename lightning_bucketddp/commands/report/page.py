"""The page of a recorded run: one HTML file that needs no network, no library and no other file.

Times on the page are milliseconds; those of a step count from its beginning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from typing import Any

from lightning_bucketddp import __version__
from lightning_bucketddp.config import AUTO, MIB, ReducerConfig
from lightning_bucketddp.planning.cost import Profile
from lightning_bucketddp.planning.optimal_plan import optimal_plan, predict
from lightning_bucketddp.planning.plan import BucketSpec
from lightning_bucketddp.planning.simulation import simulate
from lightning_bucketddp.recording.reader import AlignedStep, RunRecord, align, shown_steps
from lightning_bucketddp.recording.schema import RecordedPlan, Span, Step
from lightning_bucketddp.recording.summary import suggestions
from lightning_bucketddp.recording.typical_step import NO_COST, RankNumbers, TypicalStep, plan_in
from lightning_bucketddp.wording import list_some

_SMALLEST_MB = 0.25
_PER_DOUBLING = 2
# In this order: a script uses those before it.
_SCRIPTS = ("elements.js", "head.js", "timeline.js", "plan.js", "plots.js", "page.js")

Json = dict[str, Any]


def make_page(record: RunRecord) -> str:
    """Return the HTML of the page."""
    # Names come from users' code: none may end the script element that holds them.
    content = json.dumps(page_content(record), separators=(",", ":")).replace("<", "\\u003c")
    return (
        _asset("page.html")
        .replace("/* page.css */", _asset("page.css"))
        .replace("/* scripts */", "\n".join(map(_asset, _SCRIPTS)))
        .replace("/* content */", content)
    )


@dataclass(frozen=True)
class InlinePage:
    """A page that a notebook shows below the cell that returns it."""

    html: str
    height: int

    def _repr_html_(self) -> str:
        # In a frame without an origin: neither its scripts nor its styles reach the notebook. No server, no other file.
        return (
            f'<iframe srcdoc="{escape(self.html)}" sandbox="allow-scripts" title="bucketddp report"'
            f' style="width: 100%; height: {self.height}px; border: 0"></iframe>'
        )


def _asset(name: str) -> str:
    return files("lightning_bucketddp.commands.report").joinpath("assets", name).read_text(encoding="utf-8")


# --- Content


def page_content(record: RunRecord) -> Json:
    """Return everything that the page's scripts read, as JSON."""
    ranks = [RankNumbers.of(ours.run, [ours.steps[n] for n in sorted(ours.steps)]) for ours in record.ranks.values()]
    typical = TypicalStep(ranks, num_ranks=record.first.run.world_size)
    return {
        "version": __version__,
        "folder": str(record.folder.resolve()),
        "problems": list(record.problems),
        "run": _run(record),
        "ranks": [_rank(rank) for rank in typical.ranks],
        "typical": _typical(typical),
        "suggestions": suggestions(
            typical,
            record.last_plan,
            record.first.profile,
            options=record.first.run.options,
            codecs=record.first.run.codecs,
        ),
        "steps": [_step(align(record, number), ranks=record.ranks) for number in shown_steps(record)],
        "plans": {str(version): [asdict(b) for b in plan.buckets] for version, plan in record.first.plans.items()},
        "history": _history(record),
        "sizes": _sizes(record, typical),
        "noSizes": _why_no_sizes(record),
        "tuning": record.first.tuning,
    }


def _run(record: RunRecord) -> Json:
    run = record.first.run
    return {
        "worldSize": run.world_size,
        "device": run.device,
        "backend": run.backend,
        "numParameters": run.num_parameters,
        "gradientBytes": run.gradient_bytes,
        "memoryBytes": max(step.memory_bytes for ours in record.ranks.values() for step in ours.steps.values()),
        "options": run.options,
    }


def _rank(numbers: RankNumbers) -> Json:
    return {
        "rank": numbers.rank,
        "host": numbers.host,
        "step": _ms(numbers.step_s),
        "own": _ms(numbers.own_s),
        "exposed": _ms(numbers.exposed_s),
    }


def _typical(typical: TypicalStep) -> Json:
    straggler = typical.straggler
    return {
        "phases": {name: _ms(seconds) for name, seconds in typical.phases.items()},
        "step": _ms(typical.step_s),
        "communication": _ms(typical.communication_s),
        "exchange": _ms(typical.exchange_s),
        "overlap": typical.overlap,
        # Its index among the ranks; -1: none.
        "straggler": -1 if straggler is None else typical.ranks.index(straggler.rank),
        "stragglerBy": 0.0 if straggler is None else _ms(straggler.by_s),
    }


def _step(step: AlignedStep, *, ranks: Iterable[int]) -> Json:
    return {
        "number": step.number,
        "plan": step.plan,
        "length": _ms(step.end_s - step.start_s),
        "ranks": [_lanes(step.ranks[rank], step.start_s) if rank in step.ranks else None for rank in ranks],
    }


def _lanes(step: Step, zero_s: float) -> Json:
    """Return spans as [name, start, end], buckets as [ready, launched, start, end], gathers as [bucket, start, end]."""
    return {
        "spans": [[span.name, _ms(span.start_s - zero_s), _ms(span.end_s - zero_s)] for span in step.spans],
        "buckets": [
            [_ms(s - zero_s) for s in (times.ready_s, times.launched_s, span.start_s, span.end_s)]
            for times, span in zip(step.buckets, step.reductions(), strict=True)
        ],
        "gathers": [
            [times.bucket, _ms(span.start_s - zero_s), _ms(span.end_s - zero_s)]
            for times, span in zip(step.gathers, step.exchanges(), strict=True)
        ],
    }


def _history(record: RunRecord) -> Json:
    """Return, by rank and step, the time of the step with and without waiting for reductions."""
    numbers = record.step_numbers
    step_by_rank = [[ours.steps.get(number) for number in numbers] for ours in record.ranks.values()]
    return {
        "steps": numbers,
        "step": [[step and _ms(step.step_s) for step in steps] for steps in step_by_rank],
        "own": [[step and _ms(step.own_s) for step in steps] for steps in step_by_rank],
    }


def _sizes(record: RunRecord, typical: TypicalStep) -> Json | None:
    plan = record.last_plan
    profile = None if plan is None else typical.profile(plan, record.first.profile)
    if plan is None or profile is None or profile.cost is None or not profile.dense_bytes:
        return None
    return predict_sizes(profile, plan)


def _why_no_sizes(record: RunRecord) -> str:
    """Say why no sizes can be predicted."""
    why = f"What an all-reduce costs at other sizes cannot be told from this run: {NO_COST}."
    if record.first.run.options.get("shard_optimizer"):
        return why
    if record.first.run.options.get("bucket_cap_mb") == AUTO:
        return f'{why} bucket_cap_mb="{AUTO}" measures it if there are several buckets and 17 backwards or more.'
    return (
        f'{why} Train with bucket_cap_mb="{AUTO}", which measures it, to see the wait that is predicted for them here.'
    )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


# --- Bucket sizes


def predict_sizes(profile: Profile, current: RecordedPlan) -> Json:
    """Simulate the recorded backward with a grid of bucket sizes, with the plan in use, and with the best plan.

    The plan in use is left out if it has other parameters; `profile` must have a cost.
    """
    assert profile.cost is not None
    configs = {cap_mb: ReducerConfig(bucket_cap_mb=cap_mb) for cap_mb in _caps_mb(profile)}
    used = plan_in(profile, current)
    return {
        "byCap": [_predict(profile, predict(profile, c, profile.cost).plan, cap_mb=mb) for mb, c in configs.items()],
        "current": None if used is None else _predict(profile, used),
        "optimum": _predict(profile, optimal_plan(profile)),
    }


def _caps_mb(profile: Profile) -> list[float]:
    """Return the sizes to try: from the smallest that makes sense to one bucket for all."""
    largest_mb = max(profile.dense_bytes / MIB, 2 * _SMALLEST_MB)
    num_steps = math.ceil(_PER_DOUBLING * math.log2(largest_mb / _SMALLEST_MB))
    return [_SMALLEST_MB * 2 ** (i / _PER_DOUBLING) for i in range(num_steps + 1)]


def _predict(profile: Profile, plan: Sequence[BucketSpec], *, cap_mb: float | None = None) -> Json:
    """Return how long a step would wait; the cap is by default the largest bucket of several parameters."""
    assert profile.cost is not None
    if cap_mb is None:
        shared = [bucket for bucket in plan if len(bucket.members) > 1] or plan
        cap_mb = max(sum(profile.specs[i].num_bytes for i in bucket.members) for bucket in shared) / MIB
    return {"cap": cap_mb, "buckets": len(plan), "exposed": _ms(simulate(profile, plan, profile.cost).exposed_s)}


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
