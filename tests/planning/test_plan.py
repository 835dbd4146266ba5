"""Where parameters go, and which rank keeps what. Pure, so all plans of small grids are checked."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from lightning_bucketddp.config import MIB, BucketCaps, ReducerConfig
from lightning_bucketddp.planning.plan import (
    BucketSpec,
    ParameterSpec,
    Sharding,
    merge_plans,
    plan_buckets,
)
from tests.support.cases import for_each


def specs(*sizes: int) -> list[ParameterSpec]:
    return [ParameterSpec(f"p{i}", num_bytes=size, kind="float32") for i, size in enumerate(sizes)]


def members(plan: list[BucketSpec]) -> list[tuple[int, ...]]:
    return [bucket.members for bucket in plan]


def uniform(cap: int) -> BucketCaps:
    return BucketCaps(by_position=(cap,), last=None)


@for_each(
    ("sizes", "arrived", "missing", "caps", "expected"),
    [
        # A parameter that no longer fits closes a bucket; one that is larger than the cap has a bucket of its own.
        ([4] * 5, [4, 3, 2, 1, 0], [], uniform(8), [(4, 3), (2, 1), (0,)]),
        ([2, 100, 2, 2], range(4), [], uniform(8), [(0,), (1,), (2, 3)]),
        # A list of caps holds bucket by bucket, and its last value for the rest.
        ([2] * 8, range(8), [], BucketCaps((2, 6), last=None), [(0,), (1, 2, 3), (4, 5, 6), (7,)]),
        # The first and the last bucket are small; a last parameter larger than the last cap leaves alone.
        ([2] * 6, range(6), [], BucketCaps((2, 100), last=2), [(0,), (1, 2, 3, 4), (5,)]),
        ([2, 2, 50], range(3), [], BucketCaps((100,), last=2), [(0, 1), (2,)]),
        # Parameters that did not arrive come last, in buckets of their own.
        ([1] * 4, [3, 1], [2, 0], uniform(100), [(3, 1), (2, 0)]),
    ],
)
def test_buckets_are_filled_in_the_order_of_arrival_up_to_their_caps(
    sizes: list[int], arrived: list[int], missing: list[int], caps: BucketCaps, expected: list[tuple[int, ...]]
) -> None:
    assert members(plan_buckets(specs(*sizes), arrived=arrived, missing=missing, caps=caps)) == expected


def test_buckets_hold_one_kind_and_leave_when_their_last_member_has_arrived() -> None:
    mixed = [ParameterSpec(str(i), 4, "float32" if i % 2 else "float64") for i in range(6)]
    plan = plan_buckets(mixed, arrived=[0, 1, 2, 3, 4, 5], missing=[], caps=uniform(8))
    assert members(plan) == [(0, 2), (1, 3), (4,), (5,)]


@for_each("kind", [{"sparse": True}, {"alone": True}])
def test_sparse_and_large_gradients_travel_alone_and_before_a_small_bucket_that_carries_the_flags(
    kind: dict[str, Any],
) -> None:
    # The other gradients fill their bucket around it; one that is not small does not wait to carry the flags.
    params = [*specs(4, 4, 4), ParameterSpec("other", 50, "float32", **kind)]
    plan = plan_buckets(params, arrived=[0, 3, 1, 2], missing=[], caps=uniform(100))
    assert plan == [BucketSpec((3,), **kind), BucketSpec((0, 1, 2))]
    params = [*specs(2**20 + 1), ParameterSpec("last", 4, "float32", **kind)]
    plan = plan_buckets(params, arrived=[0, 1], missing=[], caps=uniform(2**21))
    assert plan == [BucketSpec((0,)), BucketSpec((1,), **kind), BucketSpec(())]


@for_each("sizes", [list(s) for s in itertools.product([1, 3, 9], repeat=4)])
@for_each("caps", [uniform(4), BucketCaps(by_position=(1, 10), last=1)])
def test_every_parameter_is_placed_once_in_order_and_within_the_cap(sizes: list[int], caps: BucketCaps) -> None:
    plan = plan_buckets(specs(*sizes), arrived=[2, 0, 3], missing=[1], caps=caps)
    assert list(itertools.chain(*members(plan))) == [2, 0, 3, 1]
    for bucket in plan:
        assert len(bucket.members) == 1 or sum(sizes[i] for i in bucket.members) <= max(caps.by_position)


@for_each("bucket_cap_mb", [0, -1, float("nan"), float("inf"), [], [5, 0], [None], "25", True])
def test_a_cap_that_is_no_positive_number_is_refused(bucket_cap_mb: object) -> None:
    with pytest.raises(
        ValueError, match=r"`bucket_cap_mb` must be 'auto', a positive number of MiB or a non-empty list"
    ):
        ReducerConfig(bucket_cap_mb=bucket_cap_mb)  # type: ignore[arg-type]


def test_what_travels_is_checked() -> None:
    with pytest.raises(ValueError, match=r"`reduce_dtype` must be one of fp32, bf16, fp16, int8, .* got 'fp8'"):
        ReducerConfig(reduce_dtype="fp8")
    with pytest.raises(ValueError, match="`reduce_dtype` and a communication hook both say what travels"):
        ReducerConfig(reduce_dtype="bf16", comm_hook=print)


def test_a_number_means_that_size_with_small_edges_and_a_list_exactly_that() -> None:
    assert ReducerConfig(bucket_cap_mb=None).caps == BucketCaps((MIB, 25 * MIB), last=MIB)
    assert ReducerConfig(bucket_cap_mb="auto").caps == ReducerConfig().caps == ReducerConfig(bucket_cap_mb=25).caps
    assert ReducerConfig(bucket_cap_mb=40).caps == BucketCaps((MIB, 40 * MIB), last=MIB)
    assert ReducerConfig(bucket_cap_mb=0.5).caps == BucketCaps((MIB // 2, MIB // 2), last=MIB // 2)
    assert ReducerConfig(bucket_cap_mb=[3, 20.5]).caps == BucketCaps((3 * MIB, 20 * MIB + MIB // 2), last=None)


def test_buckets_of_two_plans_leave_when_their_last_trained_member_has_arrived() -> None:
    # Parameter 5 of the first bucket is not trained at the moment.
    known = [BucketSpec((0, 5), sharded=Sharding(2)), BucketSpec((3,), sharded=Sharding(2))]
    merged = merge_plans(known, [BucketSpec((1, 2)), BucketSpec((4,))], specs(*[4] * 6), arrived=[4, 3, 2, 1, 0])
    assert [bucket.members for bucket in merged] == [(4,), (3,), (1, 2), (0, 5)]


def test_a_merged_plan_ends_with_a_bucket_that_has_room_for_flags() -> None:
    known = [BucketSpec((0,), alone=True, sharded=Sharding(2))]
    merged = merge_plans(known, [BucketSpec((1,), sparse=True), BucketSpec((2,))], specs(*[4] * 6), arrived=[2, 1, 0])
    assert not merged[-1].alone
    assert not merged[-1].sparse
    assert sorted(member for bucket in merged for member in bucket.members) == [0, 1, 2]
