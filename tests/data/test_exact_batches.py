"""Shares of evaluation data: every sample on one rank, and as many batches on all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler

from lightning_bucketddp.data.exact_batches import (
    Part,
    ShareOfBatches,
    ShareOfSamples,
    ShareOfWholeBatches,
    divided,
)
from tests.support.scripts.evaluations import ByParity, Numbered

SETTINGS = list(itertools.product(range(30), range(1, 5), range(1, 7)))


def shares_of(batches: Callable[[], Any], kind: Any, world_size: int, **options: Any) -> list[Any]:
    return [kind(batches(), Part(rank, world_size, seed=0, **options)) for rank in range(world_size)]


def samples_in(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", [ShareOfSamples, ShareOfBatches])
@pytest.mark.sampled(2)
def test_every_sample_is_on_one_rank_and_all_ranks_have_as_many_batches(kind: Any, drop_last: bool) -> None:
    for num_samples, world_size, size in SETTINGS:
        shares = shares_of(lambda n=num_samples, b=size: BatchSampler(range(n), b, drop_last), kind, world_size)  # type: ignore[misc]
        batches = [list(share) for share in shares]
        own = [own[: share.num_own_batches] for own, share in zip(batches, shares, strict=True)]
        dropped = 0 if not drop_last else num_samples % (size * world_size if kind is ShareOfSamples else size)
        kept = num_samples - dropped
        setting = (num_samples, world_size, size)
        assert sorted(samples_in([batch for rank in own for batch in rank])) == list(range(kept)), setting
        assert len({*map(len, batches), *map(len, shares)}) == 1, setting
        assert all(1 <= len(batch) <= size for rank in batches for batch in rank), setting
        if kept >= world_size and size > 1:
            assert own == batches, setting  # nothing is repeated
        if drop_last and kind is ShareOfSamples:
            assert all(len(batch) == size for rank in batches for batch in rank), setting


def test_shares_are_those_that_ddp_gives_less_what_it_repeats() -> None:
    shares = [list(share) for share in shares_of(lambda: BatchSampler(range(11), 2, False), ShareOfSamples, 3)]
    assert shares == [[[0, 3], [6, 9]], [[1, 4], [7, 10]], [[2, 5], [8]]]


def test_a_batch_is_split_where_others_have_one_more() -> None:
    first, second = (list(share) for share in shares_of(lambda: BatchSampler(range(9), 4, False), ShareOfSamples, 2))
    assert first == [[0, 2, 4, 6], [8]]
    assert second == [[1, 3], [5, 7]]


def test_whole_batches_are_dealt_out_as_they_are() -> None:
    for num_samples, world_size, size in SETTINGS:
        make = lambda n=num_samples, b=size: ByParity(range(n), b, False)  # noqa: E731
        ranks = [list(share) for share in shares_of(make, ShareOfWholeBatches, world_size, repeats=False)]
        in_turns = [batch for turn in itertools.zip_longest(*ranks) for batch in turn if batch is not None]
        assert in_turns == list(make())


def test_a_sampler_that_draws_gives_all_ranks_the_same_order_and_leaves_their_random_numbers() -> None:
    seen = []
    for rank in range(3):
        torch.manual_seed(rank)
        loader = DataLoader(Numbered(31), batch_size=4, sampler=SubsetRandomSampler(range(0, 31, 2)))
        exact = divided(loader, Part(rank, 3, seed=7))
        seen += samples_in(list(exact.batch_sampler))
        assert torch.initial_seed() == rank
        drawn = torch.rand(1)
        torch.manual_seed(rank)
        assert drawn == torch.rand(1)
    assert sorted(seen) == list(range(0, 31, 2))
    assert seen != sorted(seen)


def test_a_share_looks_like_what_it_is_a_share_of() -> None:
    class Bucketing(ByParity):
        buckets = 7

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    original = Bucketing(range(9), 2, drop_last=False)
    exact = divided(DataLoader(Numbered(9), batch_sampler=original), Part(0, 2, seed=0))
    assert isinstance(exact.batch_sampler, BatchSampler)
    share: Any = exact.batch_sampler
    assert (share.batch_size, share.drop_last, share.buckets) == (2, False, 7)
    share.set_epoch(3)
    assert original.epoch == 3
