"""The computed plan beside every other plan, on cases small enough to try them all, in whole numbers."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.planning.cost import AllReduceCost, Network, Profile, simulate
from lightning_bucketddp.planning.optimal_plan import CEILING_BYTES, optimal_plan
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec, plan_buckets
from tests.support.cases import for_each


def profile_of(
    sizes: Sequence[int],
    ready: Sequence[float],
    *,
    latency: float = 1.0,
    kinds: Sequence[str] | None = None,
    s_per_byte: float = 1.0,
) -> Profile:
    kinds = kinds or ["float32"] * len(sizes)
    specs = [ParameterSpec(f"p{i}", size, kind) for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True))]
    cost = AllReduceCost(latency, s_per_byte)
    return Profile(specs, ready, backward_s=max(ready, default=0.0), cost=cost, num_ranks=2)


def random_profile(rng: random.Random, num_params: int, num_kinds: int = 1) -> Profile:
    sizes = [rng.choice([0, 1, 2, 5, 20]) for _ in range(num_params)]
    ready = sorted(rng.randrange(rng.choice([3, 20, 60])) for _ in range(num_params))
    if rng.random() < 0.2:  # times are medians of several backwards: gradients can change places
        rng.shuffle(ready)
    kinds = [rng.choice("ab"[:num_kinds]) for _ in range(num_params)]
    return profile_of(sizes, [float(r) for r in ready], latency=float(rng.choice([0, 1, 5, 30])), kinds=kinds)


def members(plan: Sequence[BucketSpec]) -> list[tuple[int, ...]]:
    return [bucket.members for bucket in plan]


def partitions(items: Sequence[int]) -> Iterator[list[BucketSpec]]:
    """All ways to cut `items` into buckets of neighbours."""
    if not items:
        yield []
    for size in range(1, len(items) + 1):
        for rest in partitions(items[size:]):
            yield [BucketSpec(tuple(items[:size])), *rest]


def fits(plan: Sequence[BucketSpec], profile: Profile, ceiling: int) -> bool:
    sizes = [[profile.specs[i].num_bytes for i in bucket.members] for bucket in plan]
    return all(len(bucket) == 1 or sum(bucket) <= ceiling for bucket in sizes)


def last_end(profile: Profile, plan: Sequence[BucketSpec]) -> float:
    assert profile.cost is not None
    return simulate(profile, plan, profile.cost).buckets[-1].end_s


@for_each("num_params", range(1, 10))
@for_each("ceiling", [10**9, 12, 0])
def test_no_other_plan_ends_earlier_or_needs_fewer_buckets(num_params: int, ceiling: int) -> None:
    rng = random.Random(1000 * num_params + ceiling)
    for _ in range(25):
        profile = random_profile(rng, num_params)
        plan = optimal_plan(profile, ceiling_bytes=ceiling)
        allowed = [p for p in partitions(profile.arrived) if fits(p, profile, ceiling)]
        assert plan in allowed
        best = min((last_end(profile, other), len(other)) for other in allowed)
        assert (last_end(profile, plan), len(plan)) == best, profile


def test_ten_thousand_parameters_are_planned_at_once() -> None:
    rng = random.Random(0)
    sizes = [rng.choice([4_000, 40_000, 4_000_000]) for _ in range(10_000)]
    ready = [i * 1e-5 for i in range(10_000)]
    for kinds in (["float32"] * 10_000, ["float32", "bfloat16", "float64", "float16"] * 2_500):
        profile = profile_of(sizes, ready, latency=1e-4, s_per_byte=1e-10, kinds=kinds)
        start = time.thread_time()
        optimal_plan(profile)
        assert time.thread_time() - start < 2  # 0.1 s; a search over all pairs takes a minute


@for_each("num_params", range(2, 10))
def test_gradients_that_travel_alone_are_planned_around(num_params: int) -> None:
    rng = random.Random(num_params)
    for _ in range(40):
        profile = random_profile(rng, num_params)
        alone = set(rng.sample(range(num_params - 1), rng.randrange(num_params)))
        specs = [replace(spec, alone=i in alone) for i, spec in enumerate(profile.specs)]
        profile = replace(profile, specs=specs, ready_s=sorted(profile.ready_s))
        together = [i for i in profile.arrived if i not in alone]
        lone = [BucketSpec((i,), alone=True) for i in alone]
        others = [sorted(other + lone, key=lambda bucket: bucket.members[-1]) for other in partitions(together)]
        plan = optimal_plan(profile)
        assert plan in others
        best = min((last_end(profile, other), len(other)) for other in others)
        assert (last_end(profile, plan), len(plan)) == best, profile


@for_each("network", [Network("fast", 50e9, 5e-6), Network("slow", 125e6, 3e-5)])
@for_each("num_ranks", [2, 64, 1024])
def test_it_is_never_later_than_25_mib(network: Network, num_ranks: int) -> None:
    rng = random.Random(num_ranks)
    cost, caps = network.all_reduce(num_ranks), ReducerConfig(bucket_cap_mb=25).caps
    for _ in range(40):
        sizes = [int(10 ** rng.uniform(3, 8.3)) for _ in range(rng.randrange(1, 120))]
        ready = sorted(rng.uniform(0, 0.3) for _ in sizes)
        profile = profile_of(sizes, ready, latency=cost.latency_s, s_per_byte=cost.s_per_byte)
        plan = optimal_plan(profile)
        assert sorted(sum(members(plan), ())) == list(profile.arrived)
        assert fits(plan, profile, CEILING_BYTES)
        of_25_mib = plan_buckets(profile.specs, arrived=profile.arrived, missing=profile.missing, caps=caps)
        assert last_end(profile, plan) <= last_end(profile, of_25_mib) * (1 + 1e-6)


@for_each("num_params", range(2, 9))
def test_no_other_stretches_of_several_kinds_end_earlier(num_params: int) -> None:
    rng = random.Random(num_params)
    for _ in range(30):
        profile = random_profile(rng, num_params, num_kinds=2)
        best = min(end_of_stretches(profile, other) for other in partitions(profile.arrived))
        assert last_end(profile, optimal_plan(profile)) <= best, profile


def end_of_stretches(profile: Profile, stretches: Sequence[BucketSpec]) -> float:
    """When the last reduction ends if each stretch leaves as a whole, one bucket for each kind in it."""
    assert profile.cost is not None
    end = ready = 0.0
    for stretch in stretches:
        ready = max(ready, *[profile.ready_s[i] for i in stretch.members])
        num_kinds = len({profile.specs[i].kind for i in stretch.members})
        num_bytes = sum(profile.specs[i].num_bytes for i in stretch.members)
        end = max(end, ready) + num_kinds * profile.cost.latency_s + num_bytes * profile.cost.s_per_byte
    return end


def test_what_never_arrived_or_is_sparse_is_placed_as_ever() -> None:
    specs = [ParameterSpec(f"p{i}", 4, "float32", sparse=i in (1, 4)) for i in range(6)]
    profile = Profile(specs, [0.0, 1.0, 2.0], backward_s=3.0, cost=AllReduceCost(100.0, 1.0), num_ranks=2)
    assert optimal_plan(profile) == [
        BucketSpec((0, 2)),
        BucketSpec((1,), sparse=True),
        BucketSpec((4,), sparse=True),
        BucketSpec((3, 5)),
    ]
    nothing_arrived = replace(profile, specs=specs[2:4], ready_s=[])
    assert optimal_plan(nothing_arrived) == [BucketSpec((0, 1))]
