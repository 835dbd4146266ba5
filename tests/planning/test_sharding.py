"""How optimizer state is divided, and what a step with reduce-scatter and all-gather waits for."""

from __future__ import annotations

import random

import pytest

from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.planning.cost import AllReduceCost, Network, Profile, SimulatedBucket, simulate
from lightning_bucketddp.planning.optimal_plan import first_plan, predict, state_by_rank
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec, Shares
from tests.planning.test_simulation import profile_of_three
from tests.support.cases import for_each

SHARES = Shares(2)
THREE_SHARDED = [BucketSpec((0,), sharded=SHARES), BucketSpec((1,), sharded=SHARES), BucketSpec((2,), sharded=SHARES)]


def random_profile(seed: int) -> Profile:
    rng = random.Random(seed)
    specs = [
        ParameterSpec(f"{i}", 4 * rng.randrange(1, 2**20), "torch.float32 cpu", sparse=i == 7, alone=i % 5 == 0)
        for i in range(30)
    ]
    ready_s = sorted(rng.uniform(0, 0.05) for _ in range(27))
    return Profile(specs, ready_s, 0.05, None, 2, forward_s=rng.choice([0.0, 0.03]), optimizer_s=0.01)


# --- State


@for_each("num_ranks", [2, 3, 8, 1024])
def test_the_state_of_all_ranks_is_the_whole(num_ranks: int) -> None:
    profile = random_profile(num_ranks)
    plan = first_plan(profile, ReducerConfig(), num_shards=num_ranks)
    state = state_by_rank(profile.specs, plan, num_ranks=num_ranks)
    assert state.whole_bytes == 2 * profile.specs[7].num_bytes
    assert sum(state.divided_bytes) == 2 * profile.dense_bytes
    assert state.unsharded_bytes == 2 * (profile.dense_bytes + profile.specs[7].num_bytes)
    assert len(state.divided_bytes) == num_ranks
    # Each bucket is divided evenly, but for less than an aligned slice.
    most = 2 * profile.dense_bytes / num_ranks + 2 * 64 * len(plan) + state.whole_bytes
    assert max(state.divided_bytes) + state.whole_bytes == state.most_bytes <= most


def test_what_has_no_equal_slices_does_not_travel_alone() -> None:
    specs = [ParameterSpec(name, size, "torch.float32 cpu", alone=True) for name, size in [("a", 36), ("b", 40)]]
    profile = Profile(specs, [1.0, 2.0], 2.0, None, 2)
    plan = first_plan(profile, ReducerConfig(bucket_cap_mb=25), num_shards=3)
    assert [(bucket.members, bucket.alone) for bucket in plan] == [((0,), True), ((1,), False)]
    assert [bucket.sharded for bucket in plan] == [Shares(3)] * 2


# --- Time


def test_a_step_by_hand() -> None:
    timeline = simulate(profile_of_three(), THREE_SHARDED, AllReduceCost(1, 1))
    assert timeline.buckets == [
        SimulatedBucket(10, ready_s=1, start_s=1, end_s=6.5),
        SimulatedBucket(20, ready_s=2, start_s=6.5, end_s=17),
        SimulatedBucket(5, ready_s=30, start_s=30, end_s=33),
    ]
    assert [(gather.num_bytes, gather.start_s, gather.end_s) for gather in timeline.gathers] == [
        (10, 0, 5.5),
        (20, 5.5, 16),
        (5, 16, 19),
    ]
    assert timeline.weights_s == 19
    assert timeline.exposed_s == 1 + timeline.weights_s
    assert timeline.step_s == timeline.compute_s + timeline.exposed_s


@for_each("seed", range(5))
def test_both_halves_take_as_long_as_an_all_reduce(seed: int) -> None:
    profile, cost = random_profile(seed), Network("", 1e9, 1e-5).all_reduce(8)
    predicted = predict(profile, ReducerConfig(), cost, num_shards=8)
    whole = simulate(profile, [BucketSpec(b.members, b.sparse, b.alone) for b in predicted.plan], cost)
    assert predicted.communication_s == pytest.approx(whole.communication_s)
    assert whole.gathers == []
    # Weights travel as they are, whatever gradients do.
    halved = predict(profile, ReducerConfig(reduce_dtype="bf16"), cost, num_shards=8)
    assert halved.gathers == predicted.gathers
    assert halved.end_s < predicted.end_s


@for_each("seed", range(5))
def test_a_network_without_limits_exposes_nothing_and_a_slower_one_never_less(seed: int) -> None:
    profile = random_profile(seed)
    exposed = [
        predict(profile, ReducerConfig(), AllReduceCost(0, 1 / speed), num_shards=8).exposed_s
        for speed in (float("inf"), 1e12, 1e10, 1e8)
    ]
    assert exposed[0] == 0
    assert exposed == sorted(exposed)
    assert exposed[-1] > 0
