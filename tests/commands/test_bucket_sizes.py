"""What other bucket sizes would do, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_bucketddp.commands.report import predict_sizes
from lightning_bucketddp.config import MIB
from lightning_bucketddp.planning.cost import AllReduceCost, Profile
from lightning_bucketddp.planning.plan import ParameterSpec
from lightning_bucketddp.recording.schema import RecordedBucket, RecordedPlan

# Each of four gradients of 1 MiB takes one second to make, and one and a half to reduce.
NAMES = ["d", "c", "b", "a"]
PROFILE = Profile(
    [ParameterSpec(name, MIB, "float32") for name in NAMES],
    ready_s=[1.0, 2.0, 3.0, 4.0],
    backward_s=4.0,
    cost=AllReduceCost(0.5, 1.0 / MIB),
    num_ranks=2,
)


def plan_of(*buckets: str) -> RecordedPlan:
    return RecordedPlan(1, [RecordedBucket(list(names), [MIB] * len(names)) for names in buckets])


def sizes_of(profile: Profile, *buckets: str) -> dict[str, Any]:
    sizes = predict_sizes(profile, plan_of(*buckets))
    assert sizes is not None
    return sizes


def test_predictions_follow_from_the_profile() -> None:
    sizes = sizes_of(PROFILE, "dc", "ba")
    caps = {prediction["cap"]: prediction for prediction in sizes["byCap"]}
    assert min(caps) == 0.25
    assert max(caps) == 4
    # Alone: from 1 to 2.5, to 4, to 5.5, to 7.
    assert (caps[1]["buckets"], caps[1]["exposed"]) == (4, pytest.approx(3000))
    # d alone because the first is to leave early, a alone because the last is to be short: 2.5; from 3 to 5.5; to 7.
    assert (caps[2]["buckets"], caps[2]["exposed"]) == (3, pytest.approx(3000))
    # From 2 to 4.5, to 7.
    assert sizes["current"] == {"cap": 2, "buckets": 2, "exposed": pytest.approx(3000)}
    # d from 1 to 2.5, c to 4, and what is left to 6.5.
    assert (sizes["optimum"]["buckets"], sizes["optimum"]["exposed"]) == (3, pytest.approx(2500))


def test_a_plan_of_other_parameters_is_not_predicted() -> None:
    assert sizes_of(PROFILE, "dc", "bx")["current"] is None
    assert sizes_of(PROFILE, "dc")["current"] is None


def test_a_parameter_that_is_large_by_itself_does_not_count_as_the_size_of_buckets() -> None:
    specs = [ParameterSpec("d", 64 * MIB, "float32"), *PROFILE.specs[1:]]
    profile = Profile(specs, PROFILE.ready_s, 4.0, PROFILE.cost, num_ranks=2)
    current = sizes_of(profile, "d", "cba")["current"]
    assert current["cap"] == 3
