"""What the page shows, as plain data. Times are milliseconds; those of a step count from its beginning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_bucketddp import __version__
from lightning_bucketddp.commands.report.bucket_sizes import Prediction, predict_sizes
from lightning_bucketddp.config import AUTO
from lightning_bucketddp.recording.reader import AlignedStep, RunRecord, align, shown_steps
from lightning_bucketddp.recording.schema import RecordedBucket, Step
from lightning_bucketddp.recording.summary import suggestions
from lightning_bucketddp.recording.typical_step import NO_COST, RankNumbers, TypicalStep

Json = dict[str, Any]


def page_content(record: RunRecord) -> Json:
    """Everything that the page's scripts read."""
    typical = TypicalStep(
        [
            RankNumbers.of(ours.run, [ours.steps[number] for number in sorted(ours.steps)])
            for ours in record.ranks.values()
        ],
        num_ranks=record.first.run.world_size,
    )
    return {
        "version": __version__,
        "folder": str(record.folder.resolve()),
        "problems": list(record.problems),
        "run": _run(record),
        "ranks": [_rank(rank) for rank in typical.ranks],
        "typical": _typical(typical),
        "suggestions": suggestions(typical, record.last_plan, record.first.profile, options=record.first.run.options),
        "steps": [_step(align(record, number), ranks=record.ranks) for number in shown_steps(record)],
        "plans": {str(version): _buckets(plan.buckets) for version, plan in record.first.plans.items()},
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
        "overlap": typical.overlap,
        # By place among the ranks; -1: nobody.
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
        "step": [[step and _ms(step.step_s) for step in steps] for steps in step_by_rank],
        "own": [[step and _ms(step.own_s) for step in steps] for steps in step_by_rank],
    }


def _sizes(record: RunRecord, typical: TypicalStep) -> Json | None:
    plan = record.last_plan
    profile = None if plan is None else typical.profile(plan, record.first.profile)
    if profile is None or profile.cost is None or not profile.dense_bytes:
        return None
    sizes = predict_sizes(profile, plan)
    return {
        "byCap": [_prediction(prediction) for prediction in sizes.by_cap],
        "current": sizes.current and _prediction(sizes.current),
        "optimum": _prediction(sizes.optimum),
    }


def _why_no_sizes(record: RunRecord) -> str:
    """What is said where no sizes can be predicted."""
    why = f"What an all-reduce costs at other sizes cannot be told from this run: {NO_COST}."
    if record.first.run.options.get("bucket_cap_mb") == AUTO:
        return f'{why} bucket_cap_mb="{AUTO}" measures it if there are several buckets and 17 backwards or more.'
    return (
        f'{why} Train with bucket_cap_mb="{AUTO}", which measures it, to see the wait that is predicted for them here.'
    )


def _prediction(prediction: Prediction) -> Json:
    return {"cap": prediction.cap_mb, "buckets": prediction.num_buckets, "exposed": _ms(prediction.exposed_s)}


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
