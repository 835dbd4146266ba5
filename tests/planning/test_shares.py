"""Which rank keeps what. Pure, so every cut of small grids is checked."""

from __future__ import annotations

import itertools

from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec, Shares, balance, merge_plans
from tests.support.cases import for_each


@for_each(("num_ranks", "align"), itertools.product([1, 2, 3, 4, 8], [1, 4, 16]))
def test_slices_are_equal_aligned_and_without_gaps(num_ranks: int, align: int) -> None:
    for numel in range(100):
        padded = Shares(num_ranks).padded(numel, align=align)
        assert numel <= padded < numel + num_ranks * align
        bounds = Shares(num_ranks).bounds(padded)
        assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
        assert bounds[-1][1] == padded
        assert {stop - start for start, stop in bounds} == {padded // num_ranks}
        assert all(start % align == 0 for start, _ in bounds)


@for_each("num_ranks", [1, 2, 3, 4])
def test_each_element_of_a_parameter_is_of_the_rank_whose_slice_it_lies_in(num_ranks: int) -> None:
    shares = Shares(num_ranks)
    of = 12 * num_ranks
    for offset, numel in itertools.product(range(0, of, 5), range(1, of)):
        if offset + numel > of:
            continue
        owners = [
            rank for rank, (start, stop) in enumerate(shares.ranges(offset, numel, of=of)) for _ in range(start, stop)
        ]
        assert owners == [(offset + element) // 12 for element in range(numel)]


def test_an_owner_has_all_and_the_others_nothing() -> None:
    shares = Shares(3, owner=1)
    assert shares.padded(17, align=16) == 32
    assert shares.bounds(32) == [(0, 0), (0, 32), (0, 0)]
    ranges = shares.ranges(16, 10, of=32)
    assert ranges[1] == (0, 10)
    assert all(start == stop for start, stop in (ranges[0], ranges[2]))


def test_the_largest_goes_to_whom_has_least() -> None:
    loads = [0, 0, 0]
    assert balance([3, 10, 4, 9, 1], loads) == [2, 0, 2, 1, 2]
    assert loads == [10, 9, 8]
    # What comes later fills up.
    assert balance([1, 1, 5], loads) == [1, 0, 2]
    assert loads == [11, 10, 13]


def test_no_rank_has_more_than_its_part_and_one_more() -> None:
    sizes = [(7 * i) % 31 + 1 for i in range(50)]
    loads = [0] * 4
    balance(sizes, loads)
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / 4 + max(sizes)


SPECS = [ParameterSpec(f"p{i}", num_bytes=4, kind="float32") for i in range(6)]


def test_buckets_of_two_plans_leave_when_their_last_trained_member_has_arrived() -> None:
    # Parameter 5 of the first bucket is not trained at the moment.
    known = [BucketSpec((0, 5), sharded=Shares(2)), BucketSpec((3,), sharded=Shares(2))]
    merged = merge_plans(known, [BucketSpec((1, 2)), BucketSpec((4,))], SPECS, arrived=[4, 3, 2, 1, 0])
    assert [bucket.members for bucket in merged] == [(4,), (3,), (1, 2), (0, 5)]


def test_a_merged_plan_ends_with_a_bucket_that_has_room_for_flags() -> None:
    known = [BucketSpec((0,), alone=True, sharded=Shares(2))]
    merged = merge_plans(known, [BucketSpec((1,), sparse=True), BucketSpec((2,))], SPECS, arrived=[2, 1, 0])
    assert not merged[-1].alone
    assert not merged[-1].sparse
    assert sorted(member for bucket in merged for member in bucket.members) == [0, 1, 2]
