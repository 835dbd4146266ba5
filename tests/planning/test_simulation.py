"""What an all-reduce costs, here and elsewhere, and what a plan makes of a backward."""

from __future__ import annotations

import random

import pytest

from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.planning.cost import AllReduceCost, Network, Profile, SimulatedBucket, simulate
from lightning_bucketddp.planning.optimal_plan import first_plan, predict, state_by_rank
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec, Sharding
from tests.support.cases import for_each

SIZES = [4_096, 262_144, 2**22, 2**25]


def test_outliers_noise_and_the_largest_size_do_not_bend_it() -> None:
    true = AllReduceCost(200e-6, 1 / 5e9)
    rng = random.Random(0)
    measured = {
        size: [*(true.seconds(size) * rng.uniform(0.97, 1.03) for _ in range(4)), 100 * true.seconds(size)]
        for size in SIZES
    }
    fitted = AllReduceCost.fit(measured)
    assert fitted.latency_s == pytest.approx(true.latency_s, rel=0.1)
    assert fitted.s_per_byte == pytest.approx(true.s_per_byte, rel=0.1)
    fitted = AllReduceCost.fit({size: [true.seconds(size) * (1.2 if size == SIZES[-1] else 1)] for size in SIZES})
    assert fitted.latency_s == pytest.approx(true.latency_s, rel=0.1)


@for_each(
    "measured",
    [{1000: [1.0], 2000: [0.5]}, {1000: [1.0], 2000: [5.0]}, {1000: [1.0]}, {0: [1.0]}, {1000: [0.0], 2000: [0.0]}],
)
def test_no_cost_is_negative(measured: dict[int, list[float]]) -> None:
    fitted = AllReduceCost.fit(measured)
    assert fitted.latency_s >= 0
    assert fitted.s_per_byte >= 0


def test_a_network_costs_hops_and_its_share_of_the_bytes() -> None:
    network = Network("test", bytes_per_s=1e9, hop_s=1e-5)
    assert network.all_reduce(1) == AllReduceCost(0, 0)
    assert network.all_reduce(2) == AllReduceCost(2e-5, 1e-9)
    assert network.all_reduce(4) == AllReduceCost(4e-5, 1.5e-9)
    # A ring would take 2,046 hops; trees take twice the height.
    assert network.all_reduce(1024).latency_s == pytest.approx(20e-5)
    assert network.all_reduce(1024).s_per_byte == pytest.approx(2e-9, rel=1e-3)


@for_each("num_ranks", [2, 3, 8, 100])
def test_a_measured_network_costs_what_was_measured(num_ranks: int) -> None:
    cost = AllReduceCost(40e-6, 2e-10)
    again = Network.measured(cost, num_ranks=num_ranks).all_reduce(num_ranks)
    assert again.latency_s == pytest.approx(cost.latency_s)
    assert again.s_per_byte == pytest.approx(cost.s_per_byte)


def profile_of_three() -> Profile:
    specs = [
        *[ParameterSpec(name, size, "float32") for name, size in [("c", 10), ("b", 20), ("a", 5)]],
        ParameterSpec("rows", 40, "float32", sparse=True),
        ParameterSpec("unused", 7, "float32"),
    ]
    return Profile(specs, [1.0, 2.0, 30.0, 31.0], 32.0, AllReduceCost(1.0, 1.0), 2, forward_s=10.0, optimizer_s=3.0)


def test_reductions_run_one_after_the_other_when_their_buckets_are_complete() -> None:
    timeline = simulate(profile_of_three(), [BucketSpec((0,)), BucketSpec((1,)), BucketSpec((2,))], AllReduceCost(1, 1))
    assert timeline.buckets == [
        SimulatedBucket(10, ready_s=1, start_s=1, end_s=12),
        SimulatedBucket(20, ready_s=2, start_s=12, end_s=33),
        SimulatedBucket(5, ready_s=30, start_s=33, end_s=39),
    ]
    assert (timeline.exposed_s, timeline.compute_s, timeline.step_s) == (7, 45, 52)


def test_what_did_not_arrive_is_complete_when_backward_ends_and_rows_cost_the_latency() -> None:
    plan = [BucketSpec((0, 1, 2)), BucketSpec((4,)), BucketSpec((3,), sparse=True), BucketSpec(())]
    timeline = simulate(profile_of_three(), plan, AllReduceCost(1, 0.01))
    assert [bucket.ready_s for bucket in timeline.buckets] == [30, 32, 32, 32]
    assert [bucket.num_bytes for bucket in timeline.buckets] == [35, 7, 0, 0]
    assert timeline.buckets[-1].end_s == pytest.approx(32 + 1.07 + 1 + 1)


def random_profile(seed: int) -> Profile:
    rng = random.Random(seed)
    specs = [
        ParameterSpec(f"{i}", 4 * rng.randrange(1, 2**20), "torch.float32 cpu", sparse=i == 7, alone=i % 5 == 0)
        for i in range(30)
    ]
    ready_s = sorted(rng.uniform(0, 0.05) for _ in range(27))
    return Profile(specs, ready_s, 0.05, None, 2, forward_s=rng.choice([0.0, 0.03]), optimizer_s=0.01)


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


def test_a_sharded_step_by_hand() -> None:
    plan = [BucketSpec((member,), sharded=Sharding(2)) for member in range(3)]
    timeline = simulate(profile_of_three(), plan, AllReduceCost(1, 1))
    assert timeline.buckets == [
        SimulatedBucket(10, ready_s=1, start_s=1, end_s=6.5),
        SimulatedBucket(20, ready_s=2, start_s=6.5, end_s=17),
        SimulatedBucket(5, ready_s=30, start_s=30, end_s=33),
    ]
    assert timeline.weights_s == 5.5 + 10.5 + 3
    assert timeline.exposed_s == 1 + timeline.weights_s
    assert timeline.step_s == timeline.compute_s + timeline.exposed_s


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
