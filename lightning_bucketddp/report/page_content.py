"""What the page shows, as plain data. Times are milliseconds; those of a step count from its beginning."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from lightning_bucketddp import __version__
from lightning_bucketddp.report.aligned import AlignedStep, align, shown_steps
from lightning_bucketddp.report.bucket_sizes import Prediction, predict_sizes
from lightning_bucketddp.report.marked_steps import seconds_of
from lightning_bucketddp.report.profiles import profile_of
from lightning_bucketddp.report.record import RecordedBucket, RecordedPlan, Step
from lightning_bucketddp.report.run_files import RankRecord, RunRecord

PHASES = ("data", "forward", "backward", "exposed", "optimizer")

# By which factor sizes must differ for their times to show a line, and not only noise.
_DIFFERENT = 4

Json = dict[str, Any]


def page_content(record: RunRecord) -> Json:
    """Everything that the page's scripts read."""
    return {
        "version": __version__,
        "folder": str(record.folder.resolve()),
        "problems": list(record.problems),
        "run": _run(record),
        "ranks": [{"rank": rank, "host": ours.run.host} for rank, ours in record.ranks.items()],
        "medians": _medians([step for ours in record.ranks.values() for step in ours.steps.values()]),
        "steps": [_step(align(record, number), ranks=record.ranks) for number in shown_steps(record)],
        "plans": {str(version): _buckets(plan.buckets) for version, plan in record.first.plans.items()},
        "history": _history(record),
        "sizes": _sizes(record),
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


def _medians(steps: list[Step]) -> Json:
    """The usual step of all ranks together."""
    return {
        "phases": {name: _median_ms(step.seconds(name) for step in steps) for name in PHASES},
        "step": _median_ms(map(seconds_of, steps)),
        "communication": _median_ms(step.communication_s for step in steps),
    }


def _step(step: AlignedStep, *, ranks: Iterable[int]) -> Json:
    return {
        "number": step.number,
        "plan": step.plan,
        "length": _ms(step.end_s - step.start_s),
        "ranks": [_lanes(step.ranks[rank], step.start_s) if rank in step.ranks else None for rank in ranks],
    }


def _lanes(step: Step, zero_s: float) -> Json:
    """Spans as [name, start, end], buckets as [ready, launched, start, end]."""
    reductions = step.reductions()
    return {
        "spans": [[span.name, _ms(span.start_s - zero_s), _ms(span.end_s - zero_s)] for span in step.spans],
        "buckets": [
            [_ms(s - zero_s) for s in (times.ready_s, times.launched_s, span.start_s, span.end_s)]
            for times, span in zip(step.buckets, reductions, strict=True)
        ],
    }


def _buckets(buckets: Iterable[RecordedBucket]) -> list[Json]:
    return [
        {"parameters": list(bucket.parameters), "sizes": list(bucket.sizes), "sparse": bucket.sparse}
        for bucket in buckets
    ]


def _history(record: RunRecord) -> Json:
    """By rank and step: the whole of it, and what it took without waiting for others."""
    numbers = record.step_numbers
    step_by_rank = [[ours.steps.get(number) for number in numbers] for ours in record.ranks.values()]
    return {
        "steps": numbers,
        "step": [[step and _ms(seconds_of(step)) for step in steps] for steps in step_by_rank],
        "own": [[step and _ms(seconds_of(step) - step.exposed_s) for step in steps] for steps in step_by_rank],
    }


def _sizes(record: RunRecord) -> Json | None:
    plan, profile = record.last_plan, record.first.profile
    if profile is None and plan is not None and _tells_cost(plan):
        slowest = max(record.ranks.values(), key=_own_s)
        profile = profile_of(plan, list(slowest.steps.values()), num_ranks=slowest.run.world_size)
    if profile is None or not profile.dense_bytes:
        return None
    sizes = predict_sizes(profile, plan)
    return {
        "byCap": [_prediction(prediction) for prediction in sizes.by_cap],
        "current": sizes.current and _prediction(sizes.current),
        "optimum": _prediction(sizes.optimum),
    }


def _tells_cost(plan: RecordedPlan) -> bool:
    """Whether the buckets are different enough to tell latency and bandwidth apart."""
    sizes = [bucket.num_bytes for bucket in plan.buckets if bucket.num_bytes and not bucket.sparse]
    return bool(sizes) and max(sizes) >= _DIFFERENT * min(sizes)


def _prediction(prediction: Prediction) -> Json:
    return {"cap": prediction.cap_mb, "buckets": prediction.num_buckets, "exposed": _ms(prediction.exposed_s)}


def _own_s(rank: RankRecord) -> float:
    return statistics.median(seconds_of(step) - step.exposed_s for step in rank.steps.values())


def _median_ms(seconds: Iterable[float]) -> float:
    return _ms(statistics.median(seconds))


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
