"""Profiles from recorded steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_bucketddp.core.config import MIB
from lightning_bucketddp.core.cost import AllReduceCost
from lightning_bucketddp.core.plan import BucketPlan
from lightning_bucketddp.core.timeline import simulate
from lightning_bucketddp.report.profiles import plan_in, profile_of, reduced_backward
from lightning_bucketddp.report.record import BucketTimes, RecordedBucket, RecordedPlan, Span, Step

# Two micro-batches; the second backward begins at 100 and is over at 110. Reductions take 1 s and 1 s for each MiB.
SPANS = [
    Span("forward", 90, 92),
    Span("backward", 92, 96),
    Span("data", 96, 97),
    Span("forward", 97, 100),
    Span("backward", 100, 110),
    Span("exposed", 110, 113),
    Span("backward", 113, 113.5),
    Span("optimizer", 113.5, 115),
]
STEP = Step(3, plan=1, spans=SPANS, buckets=[BucketTimes(104, 104.5, 107.5), BucketTimes(110, 110, 113)])
PLAN = RecordedPlan(1, [RecordedBucket(["d", "c"], [MIB, MIB]), RecordedBucket(["b", "a"], [MIB // 2, 3 * MIB // 2])])


def test_gradients_arrive_evenly_between_the_completions_of_buckets() -> None:
    profile = profile_of(PLAN, [STEP], num_ranks=2)
    assert profile is not None
    assert [spec.name for spec in profile.specs] == ["d", "c", "b", "a"]
    assert profile.ready_s == [2, 4, 5.5, 10]
    assert (profile.forward_s, profile.backward_s, profile.optimizer_s) == (5, 10, 1.5)
    assert profile.num_ranks == 2


def test_the_plan_that_was_recorded_is_simulated_as_it_was() -> None:
    steps = [replace(STEP, step=n, buckets=[BucketTimes(104, 104, 107), BucketTimes(110, 110, 113)]) for n in range(3)]
    profile = profile_of(PLAN, steps, num_ranks=2)
    assert profile is not None
    plan = plan_in(profile, PLAN)
    assert plan == [BucketPlan((0, 1)), BucketPlan((2, 3))]
    assert simulate(profile, plan, profile.cost).exposed_s == pytest.approx(3)


def test_costs_are_those_of_the_reductions() -> None:
    plan = RecordedPlan(1, [RecordedBucket(["b"], [MIB]), RecordedBucket(["a"], [3 * MIB])])
    step = replace(STEP, buckets=[BucketTimes(104, 104, 106), BucketTimes(109, 109, 113)])
    profile = profile_of(plan, [step], num_ranks=2)
    assert profile is not None
    assert profile.cost.latency_s == pytest.approx(1)
    assert profile.cost.s_per_byte * MIB == pytest.approx(1)


@pytest.mark.parametrize(
    ("num_bytes", "cost"), [(2 * MIB, AllReduceCost(0.0, 3 / (2 * MIB))), (1024, AllReduceCost(3.0, 0.0))]
)
def test_one_size_tells_either_the_bandwidth_or_the_latency(num_bytes: int, cost: AllReduceCost) -> None:
    plan = RecordedPlan(1, [RecordedBucket(["a"], [num_bytes]), RecordedBucket([], [])])
    step = replace(STEP, buckets=[BucketTimes(110, 110, 113), BucketTimes(110, 110, 113)])
    profile = profile_of(plan, [step], num_ranks=2)
    assert profile is not None
    assert profile.cost == cost


def test_what_shows_nothing_gives_no_profile() -> None:
    assert profile_of(PLAN, [], num_ranks=2) is None
    assert profile_of(PLAN, [replace(STEP, plan=2)], num_ranks=2) is None
    assert profile_of(PLAN, [replace(STEP, spans=SPANS[:2])], num_ranks=2) is None
    assert reduced_backward(STEP) == Span("backward", 100, 110)


def test_a_plan_of_other_parameters_is_not_simulated() -> None:
    profile = profile_of(PLAN, [STEP], num_ranks=2)
    assert profile is not None
    assert plan_in(profile, RecordedPlan(2, PLAN.buckets[:1])) is None
    assert plan_in(profile, RecordedPlan(2, [*PLAN.buckets, RecordedBucket(["e"], [4])])) is None
