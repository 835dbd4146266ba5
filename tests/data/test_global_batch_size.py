"""`global_batch_size`: as many samples make a step on any number of ranks, and across a resume on another number."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.data.global_batch_size import Division, StepSampler, divide
from tests.support.cases import for_each
from tests.support.ranks import run_on_ranks
from tests.support.scripts.global_batch import Outcome, Setting, expected_weights, refusal, train


def as_sets(steps: list[list[int]]) -> list[list[int]]:
    return [sorted(step) for step in steps]


def samples_of_steps(*runs: list[Outcome]) -> list[list[int]]:
    """The samples of all ranks in each step, sorted; of several runs, one after the other."""
    steps: dict[int, list[int]] = {}
    for ranks in runs:
        for number in sorted(ranks[0].steps):
            assert number not in steps
            steps[number] = sorted(index for rank in ranks for index in rank.steps[number])
    assert list(steps) == list(range(len(steps)))
    return list(steps.values())


def assert_weights(ranks: list[Outcome], expected: list[torch.Tensor]) -> None:
    for rank in ranks:
        for ours, theirs in zip(rank.weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


# --- The division


@for_each("num_ranks", [1, 2, 3, 4, 8])
@for_each("largest", [1, 5, 16, 1000])
@for_each("per_rank", [1, 7, 12, 60])
def test_the_fewest_batches_that_are_small_enough_make_a_step(num_ranks: int, largest: int, per_rank: int) -> None:
    division = divide(num_ranks * per_rank, num_ranks=num_ranks, largest=largest)
    assert division.batch_size * division.batches_per_step == per_rank
    assert division.batch_size <= largest
    fewer = range(1, division.batches_per_step)
    assert not [count for count in fewer if per_rank % count == 0 and per_rank // count <= largest]


@for_each(("size", "multiples"), [(50, "48 or 52"), (3, "4")])
def test_a_batch_that_the_ranks_cannot_share_is_refused(size: int, multiples: str) -> None:
    with pytest.raises(ValueError, match="cannot share") as raised:
        divide(size, num_ranks=4, largest=100)
    assert str(raised.value) == (
        f"`global_batch_size` is {size}, which 4 ranks cannot share evenly. Choose a multiple of 4, for example"
        f" {multiples}."
    )


@for_each("size", [0, -8, 2.5, "96", True])
def test_a_size_that_is_no_number_of_samples_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="global_batch_size") as raised:
        BucketDDPStrategy(global_batch_size=size)
    assert str(raised.value) == f"`global_batch_size` must be a positive number of samples, got {size!r}."


@for_each("num_samples", range(1, 40))
@for_each("division", [Division(4, 1), Division(4, 3), Division(1, 5)])
def test_each_sample_counts_the_same_in_its_step(division: Division, num_samples: int) -> None:
    for limit in (1.0, 0.7):
        sampler = StepSampler(range(num_samples), division, drop_last=False)
        batches = list(sampler)[: max(1, int(limit * len(sampler)))]
        for first in range(0, len(batches), division.batches_per_step):
            step = batches[first : first + division.batches_per_step]
            # What Lightning divides by, and a mean over each batch.
            of_samples = [
                sampler.loss_factor(first + i, num_batches=len(batches)) / division.batches_per_step / len(batch)
                for i, batch in enumerate(step)
            ]
            expected = 1 / sum(map(len, step))
            assert of_samples == pytest.approx([expected] * len(step))
            if len(step) == division.batches_per_step and len({*map(len, step)}) == 1:
                assert sampler.loss_factor(first, num_batches=len(batches)) == 1


@for_each("num_samples", [11, 12, 23, 24, 30])
def test_what_makes_no_whole_step_is_dropped(num_samples: int) -> None:
    sampler = StepSampler(range(num_samples), Division(4, 3), drop_last=True)
    assert len(list(sampler)) == len(sampler) == 3 * (num_samples // 12)


# --- Training

# 24 samples in each step, and 12 in the last one of an epoch. Batches of four, so 6, 3 and 2 of them.
WHOLE = Setting(estimates=True)


@pytest.mark.parametrize(("world_size", "batch_size", "accumulated"), [(1, 4, 6), (2, 4, 3), (4, 3, 2)])
def test_training_equals_one_process_with_the_whole_batch(world_size: int, batch_size: int, accumulated: int) -> None:
    ranks = run_on_ranks(train, world_size=world_size, setting=WHOLE, base_batch_size=24)
    assert samples_of_steps(ranks) == as_sets(WHOLE.steps())
    assert_weights(ranks, expected_weights(WHOLE.steps(), num_samples=60))
    for rank in ranks:
        assert (rank.batch_size, rank.accumulated, rank.accumulated_afterwards) == (batch_size, accumulated, 1)
        assert rank.estimated == 6
        assert rank.val_sizes == {2 if world_size == 4 else 4}
    where = f"each of {world_size} ranks" if world_size > 1 else "1 rank"
    of_ours = f"bucketddp: global batch of 24: {batch_size} samples on {where}, accumulated over {accumulated} batches"
    told = (
        f"ScaleLearningRate: global batch {world_size} x {batch_size} x {accumulated} = 24, base 24: learning rate x 1"
    )
    assert [rank.lines for rank in ranks] == [[of_ours, told], *[[]] * (world_size - 1)]


@pytest.mark.parametrize(
    "setting",
    [
        Setting(batch_size=100, num_workers=1),
        Setting(reload_every=1),
        Setting(drop_last=True, num_samples=71),
        Setting(is_in_order=True),
        Setting(num_samples=48, is_manual=True, batch_size=12),
        Setting(is_stream=True, options={"gradient_weight": "batch_size"}),
        Setting(num_samples=48, is_stream=True, drop_last=True),
    ],
    ids=["one_batch", "reloaded", "drop_last", "in_order", "manual", "stream", "whole_stream"],
)
def test_all_kinds_of_data_can_be_divided(setting: Setting) -> None:
    ranks = run_on_ranks(train, setting=setting)
    assert samples_of_steps(ranks) == as_sets(setting.steps())
    assert_weights(ranks, expected_weights(setting.steps(), num_samples=setting.num_samples))


def test_a_limit_may_end_an_epoch_within_a_step() -> None:
    setting = Setting(limit_train_batches=5)
    ranks = run_on_ranks(train, setting=setting)
    [first, second, _] = setting.steps(num_epochs=1)
    assert samples_of_steps(ranks)[:2] == as_sets([first, second[:16]])
    assert [len(step) for step in samples_of_steps(ranks)] == [24, 16, 24, 16]
    assert_weights(ranks, expected_weights(samples_of_steps(ranks), num_samples=60))


# --- Resuming


@pytest.mark.parametrize(
    ("setting", "stops_after"),
    [
        (Setting(num_samples=64), 2),
        (Setting(num_samples=64, estimates=True, num_workers=1), 4),
        (Setting(num_samples=60), 3),
        (Setting(num_samples=64, size=16, batch_size=2), 5),
    ],
    ids=["within_epoch", "workers_ask_early", "end_of_epoch", "second_epoch"],
)
@pytest.mark.sampled(2)
def test_a_run_goes_on_after_the_same_steps_on_another_number_of_ranks(
    setting: Setting, stops_after: int, tmp_path: Path
) -> None:
    expected = setting.steps()
    run = run_on_ranks(train, world_size=2, setting=setting, max_steps=stops_after, save_to=tmp_path)
    runs = [run]
    # From two ranks to four, then to one.
    steps = [stops_after, stops_after + 1, len(expected)]
    for world_size, (first, last) in zip((4, 1), pairwise(steps), strict=True):
        runs.append(
            run_on_ranks(
                train,
                world_size=world_size,
                setting=setting,
                max_steps=last,
                save_to=tmp_path,
                resume_from=tmp_path / f"step={first}.ckpt",
            )
        )
    assert samples_of_steps(*runs) == as_sets(expected)
    assert_weights(runs[-1], expected_weights(expected, num_samples=setting.num_samples))


# --- What cannot be


@for_each(
    ("case", "text"),
    [
        ("no_batches", "one with `batch_size=None`"),
        ("own_sampler", "one with a `OwnSampler` of its own"),
        ("no_loader", "a `list_iterator`"),
        ("several", "several"),
    ],
)
def test_data_that_cannot_be_divided_is_refused(case: str, text: str) -> None:
    expected = (
        "`global_batch_size` needs one training `DataLoader` that makes batches by its `batch_size`, and there is"
        f" {text}."
    )
    assert run_on_ranks(refusal, setting=Setting(), case=case) == [expected] * 2


@for_each(
    ("case", "other"), [("accumulates", "accumulate_grad_batches=2"), ("schedules", "GradientAccumulationScheduler")]
)
def test_accumulation_of_the_user_is_refused(case: str, other: str) -> None:
    expected = (
        f"`global_batch_size` says how many batches are accumulated, and so does `{other}`. Leave one of them out."
    )
    assert run_on_ranks(refusal, setting=Setting(), case=case) == [expected] * 2


def test_accumulation_in_manual_optimization_is_refused() -> None:
    expected = (
        "With `global_batch_size=24` each of 2 ranks would accumulate 3 batches of 4 samples, but with manual"
        " optimization that is left to you. Give the `DataLoader` a `batch_size` of 12 or more."
    )
    assert run_on_ranks(refusal, setting=Setting(is_manual=True), case="") == [expected] * 2


def test_a_batch_that_these_ranks_cannot_share_is_refused_before_training() -> None:
    for text in run_on_ranks(refusal, setting=Setting(size=25), case=""):
        assert text.startswith("`global_batch_size` is 25, which 2 ranks cannot share evenly.")
