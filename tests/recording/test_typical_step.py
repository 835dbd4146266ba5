"""Profiles from recorded steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_bucketddp.config import MIB
from lightning_bucketddp.recording.schema import BucketTimes, RecordedBucket, RecordedPlan, Span, Step
from lightning_bucketddp.recording.typical_step import profile_of, reduced_backward

# Two micro-batches; the second backward begins at 100 and is over at 110. LaunchQueue take 1 s and 1 s for each MiB.
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


# Of 1 and 4 MiB.
DIFFERENT = RecordedPlan(1, [RecordedBucket(["b"], [MIB]), RecordedBucket(["a"], [4 * MIB])])
REDUCED = replace(STEP, buckets=[BucketTimes(104, 104, 106), BucketTimes(110, 110, 115)])


def cost_of(plan: RecordedPlan) -> tuple[float, float]:
    """The seconds that a reduction and a MiB of it take."""
    profile = profile_of(plan, [REDUCED], num_ranks=2)
    assert profile is not None
    assert profile.cost is not None
    return profile.cost.latency_s, profile.cost.s_per_byte * MIB


def test_costs_are_those_of_the_reductions_and_an_all_reduce_costs_twice_a_reduce_scatter() -> None:
    assert cost_of(DIFFERENT) == pytest.approx((1, 1))
    scattered = [replace(bucket, sharded=True, collective="reduce-scatter") for bucket in DIFFERENT.buckets]
    assert cost_of(RecordedPlan(1, scattered)) == pytest.approx((2, 2))
    # Weights that are waited for at the end of a step are no part of its backward.
    spans = [*SPANS[:-1], Span("optimizer", 113.5, 114), Span("weights", 114, 115)]
    assert reduced_backward(replace(STEP, spans=spans)) == Span("backward", 100, 110)
