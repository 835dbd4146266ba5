"""Evaluation data in rounds: every sample counts once, and what `ddp` users rely on holds in every round."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_bucketddp.data.evaluation import Part, divided, share_of
from lightning_bucketddp.data.sharded_iterable import IterableSharding
from tests.support.scripts.evaluations import ByParity, Numbered

MANY = settings(max_examples=200, deadline=None)
NUMBERS, RANKS, SIZES = st.integers(0, 60), st.integers(1, 5), st.integers(1, 9)


class Stream(IterableDataset[int]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples))


class Unsized:
    """Batches of the user's own, without a length."""

    def __init__(self, num_samples: int, batch_size: int) -> None:
        self.batches = BatchSampler(range(num_samples), batch_size, drop_last=False)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def make_loader(kind: str, num_samples: int, batch_size: int) -> DataLoader[Any]:
    data: Any = Numbered(num_samples)
    if kind == "stream":
        return DataLoader(Stream(num_samples), batch_size=batch_size, collate_fn=list)
    if kind == "single":
        return DataLoader(data, batch_size=None)
    if kind == "batches of the user":
        return DataLoader(data, batch_sampler=ByParity(range(num_samples), batch_size, False))
    if kind == "batches of unknown number":
        return DataLoader(data, batch_sampler=Unsized(num_samples, batch_size))
    sampler: Any = SequentialSampler(data)
    if kind == "weighted" and num_samples:
        sampler = WeightedRandomSampler(range(1, num_samples + 1), num_samples, replacement=True)
    if kind == "subset":
        sampler = SubsetRandomSampler(range(0, num_samples, 2))
    return DataLoader(data, batch_size=batch_size, sampler=sampler, drop_last=kind == "drop_last")


def passes_of(loader: DataLoader[Any], part: Part, *, number: int = 1) -> tuple[list[list[list[int]]], Any]:
    """The batches of this rank, of `number` passes, and what deals them out."""
    if isinstance(loader.dataset, IterableDataset):
        place: Any = {"rank": part.rank, "world_size": part.world_size}
        sharding = IterableSharding(**place, warn=pytest.fail)
        loader = sharding.prepare_loader(loader, is_training=False)
        batches: Any = loader
    else:
        loader = divided(loader, part)
        batches = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    as_lists = [[batch if isinstance(batch, list) else [batch] for batch in batches] for _ in range(number)]
    return as_lists, share_of(loader)


SIZED = ("plain", "drop_last", "weighted", "subset", "single", "batches of the user")


@MANY
@given(st.sampled_from([*SIZED, "stream", "batches of unknown number"]), NUMBERS, RANKS, SIZES)
def test_every_sample_counts_in_rounds_of_equal_batches(kind: str, number: int, world_size: int, size: int) -> None:
    expected: list[list[int]]
    shares = []
    for rank in range(world_size):
        random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
        shares.append(passes_of(make_loader(kind, number, size), Part(rank, world_size, seed=3)))
    [expected], _ = passes_of(make_loader(kind, number, size), Part(0, 1, seed=3))
    ranks = [batches for [batches], _ in shares]
    own = [batches[: int(min(share.num_own_batches, 10**6))] for [batches], share in shares]

    def flat(batches: list[list[int]]) -> list[int]:
        return sorted(itertools.chain.from_iterable(batches))

    assert flat(list(itertools.chain.from_iterable(own))) == flat(expected)
    assert len({len(batches) for batches in ranks}) == 1
    assert own[0] == ranks[0], "rank zero repeats nothing"
    num_whole = min(len(batches) for batches in own)
    assert all(min(share.num_whole_rounds, len(ranks[0])) == num_whole for _, share in shares)
    assert all(1 <= len(batch) <= size or kind == "single" for batches in ranks for batch in batches)
    # Batches of the user's are as large as they are; only the last one is known to have a round of its own.
    if kind != "batches of the user":
        assert all(len({len(batch) for batch in of_round}) == 1 for of_round in zip(*ranks, strict=True))
    if kind in ("drop_last", "batches of the user", "batches of unknown number", "stream"):
        in_turns = [batch for of_round in itertools.zip_longest(*own) for batch in of_round if batch is not None]
        assert in_turns == expected, "whole, and in the order of one process"
    if kind == "plain" and number >= world_size:
        assert all(own), "every rank has something of its own"
    if kind == "plain" and size > 2 * world_size and number >= 2 * world_size * size:
        base = [len(batch) for batch in ranks[0]][:-1]
        assert len(ranks[0][-1]) > 1 or number // world_size % size == 1 or not base


@pytest.mark.parametrize("kind", ["weighted", "subset"])
def test_samplers_draw_alike_on_all_ranks_and_anew_in_each_pass_and_leave_random_numbers_alone(kind: str) -> None:
    def draw(rank: int, seed: int) -> list[list[int]]:
        torch.manual_seed(rank)
        before = torch.default_generator.get_state()
        passes, _ = passes_of(make_loader(kind, 40, 40), Part(0, 1, seed=seed), number=3)
        assert torch.equal(torch.default_generator.get_state(), before)
        return [batches[0] for batches in passes]

    assert draw(rank=0, seed=7) == draw(rank=1, seed=7)
    assert len({tuple(samples) for seed in (7, 8) for samples in draw(0, seed)}) == 6


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
