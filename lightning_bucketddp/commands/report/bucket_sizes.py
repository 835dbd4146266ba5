"""What other bucket sizes would make of the backward that was recorded: predicted exposed time. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_bucketddp.config import MIB, ReducerConfig
from lightning_bucketddp.planning.backward_profile import Profile
from lightning_bucketddp.planning.optimal_plan import optimal_plan
from lightning_bucketddp.planning.plan import BucketSpec, plan_buckets
from lightning_bucketddp.planning.simulation import simulate
from lightning_bucketddp.recording.schema import RecordedPlan
from lightning_bucketddp.recording.typical_step import plan_in

_SMALLEST_MB = 0.25
_PER_DOUBLING = 2


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan is expected to make of a step.

    Attributes:
        cap_mb: the largest size of its buckets, apart from parameters that are larger by themselves.
        num_buckets: how many it has.
        exposed_s: how long the step waits for their reductions.
    """

    cap_mb: float
    num_buckets: int
    exposed_s: float


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """Predictions for a grid of sizes, for the plan that was used, and for the one that ends earliest.

    `current` is None where that plan is not of the same parameters.
    """

    by_cap: Sequence[Prediction]
    current: Prediction | None
    optimum: Prediction


def predict_sizes(profile: Profile, current: RecordedPlan | None) -> BucketSizes:
    """Simulate all of them on one profile, which must know the cost."""
    grid = []
    for cap_mb in _caps_mb(profile):
        caps = ReducerConfig(bucket_cap_mb=cap_mb).caps
        plan = plan_buckets(profile.specs, arrived=profile.arrived, missing=profile.missing, caps=caps)
        grid.append(_predict(profile, plan, cap_mb=cap_mb))
    used = plan_in(profile, current) if current is not None else None
    return BucketSizes(
        by_cap=grid,
        current=_predict(profile, used) if used is not None else None,
        optimum=_predict(profile, optimal_plan(profile)),
    )


def _caps_mb(profile: Profile) -> list[float]:
    """From the smallest size that is worth a try to one bucket for all."""
    largest_mb = max(profile.dense_bytes / MIB, 2 * _SMALLEST_MB)
    num_steps = math.ceil(_PER_DOUBLING * math.log2(largest_mb / _SMALLEST_MB))
    return [_SMALLEST_MB * 2 ** (i / _PER_DOUBLING) for i in range(num_steps + 1)]


def _predict(profile: Profile, plan: Sequence[BucketSpec], *, cap_mb: float | None = None) -> Prediction:
    assert profile.cost is not None
    timeline = simulate(profile, plan, profile.cost)
    if cap_mb is None:
        shared = [bucket for bucket in plan if len(bucket.members) > 1] or plan
        cap_mb = max(sum(profile.specs[i].num_bytes for i in bucket.members) for bucket in shared) / MIB
    return Prediction(cap_mb, len(plan), timeline.exposed_s)
