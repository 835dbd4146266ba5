"""Ranks that contribute differently to a step: skipped steps, weights, and data that ends earlier than elsewhere."""

from __future__ import annotations

import pytest
import torch

from tests.support.cases import for_each
from tests.support.jobs.weighting import CONFIGS, weighted_mean
from tests.support.ranks import run_on_ranks
from tests.support.scripts.participation import (
    Outcome,
    Setting,
    expected_weights,
    fit,
    loader_with_a_distributed_sampler,
    num_tokens,
    refusal,
    scale_after_skipped_steps,
)

EVEN = [[4, 4, 4, 4, 4]] * 2
DIFFERENT_SIZES = [[4, 4, 4, 4, 1], [4, 2, 4, 7, 3]]
UNEVEN = [[4, 4, 4, 4, 4], [4, 4, 4]]


def assert_trained_as_one_process(setting: Setting) -> list[Outcome]:
    ranks: list[Outcome] = run_on_ranks(fit, world_size=len(setting.sizes), setting=setting)
    for rank in ranks:
        for ours, expected in zip(rank.weights, expected_weights(setting), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-13)
        for ours, first in zip(rank.weights, ranks[0].weights, strict=True):
            assert torch.equal(ours, first)
    return ranks


# --- Steps that return None


@pytest.mark.parametrize(
    ("skipped", "accumulate"),
    [
        ([(1, 0)], 1),
        ([(0, 1), (1, 3)], 2),
        ([(1, 4)], 2),
        ([(0, 2), (1, 2)], 1),
        ([(rank, step) for rank in (0, 1) for step in range(5)], 2),
    ],
    ids=["first", "in_turns", "last", "everywhere", "always"],
)
def test_a_skipped_step_is_left_out_of_the_average(skipped: list[tuple[int, int]], accumulate: int) -> None:
    setting = Setting(EVEN, skipped=skipped, accumulate=accumulate)
    for number, rank in enumerate(assert_trained_as_one_process(setting)):
        assert rank.num_skipped == 2 * len(skipped)
        assert rank.had_output == [(number, step) not in skipped for step in range(5)] * 2


def test_nothing_is_counted_when_nothing_is_skipped() -> None:
    for rank in run_on_ranks(fit, setting=Setting(EVEN)):
        assert rank.num_skipped == 0
        assert rank.had_output == [True] * 10


@for_each(("skipped", "num_steps"), [([(1, 2)], 5), ([(0, 2), (1, 2)], 4)])
def test_a_grad_scaler_counts_the_steps_that_some_rank_took(skipped: list[tuple[int, int]], num_steps: int) -> None:
    ranks = run_on_ranks(scale_after_skipped_steps, skipped=skipped)
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == 2**num_steps


def test_a_skipped_step_has_no_weight() -> None:
    assert_trained_as_one_process(
        Setting(DIFFERENT_SIZES, skipped=[(0, 0), (1, 3)], options={"gradient_weight": "batch_size"})
    )


# --- Weights


@for_each("accumulate", [1, 2, 3])
def test_each_sample_counts_the_same(accumulate: int) -> None:
    assert_trained_as_one_process(
        Setting(DIFFERENT_SIZES, accumulate=accumulate, options={"gradient_weight": "batch_size"})
    )


@for_each("accumulate", [1, 2])
def test_each_token_counts_the_same(accumulate: int) -> None:
    assert_trained_as_one_process(
        Setting(DIFFERENT_SIZES, accumulate=accumulate, of_tokens=True, options={"gradient_weight": num_tokens})
    )


def test_one_process_weighs_its_micro_batches() -> None:
    assert_trained_as_one_process(Setting(DIFFERENT_SIZES[1:], accumulate=2, options={"gradient_weight": "batch_size"}))


def test_several_weighted_losses_in_one_step_add_up() -> None:
    assert_trained_as_one_process(
        Setting(DIFFERENT_SIZES, manual="two_losses", options={"gradient_weight": "batch_size"})
    )


@pytest.mark.parametrize(("world_size", "num_micro_batches"), [(2, 3), (3, 1)])
@for_each("config", CONFIGS)
def test_every_kind_of_bucket_is_weighed(config: str, num_micro_batches: int, world_size: int) -> None:
    run_on_ranks(weighted_mean, world_size=world_size, config=config, num_micro_batches=num_micro_batches)


def test_the_plain_mean_is_the_default() -> None:
    assert_trained_as_one_process(Setting(DIFFERENT_SIZES))


def negative(_batch: object) -> int:
    return -1


def test_a_weight_that_is_none_is_refused() -> None:
    texts = run_on_ranks(refusal, setting=Setting(EVEN, options={"gradient_weight": negative}))
    assert texts == [
        f"ValueError: `gradient_weight` gave -1.0 for a batch on rank {rank}. A weight must be a finite number that is"
        " not negative, such as a number of samples or tokens."
        for rank in range(2)
    ]


# --- Uneven data


@pytest.mark.parametrize(
    ("sizes", "data", "accumulate"),
    [
        (UNEVEN, "iterable", 1),
        (UNEVEN, "stream", 2),
        (UNEVEN[::-1], "stream", 1),
        (UNEVEN[::-1], "sized", 2),
        ([[4], [4, 4], [4, 4, 4, 4]], "sized", 1),
        ([[4], [4, 4], [4, 4, 4, 4]], "iterable", 2),
    ],
)
@pytest.mark.sampled(4)
def test_no_batch_is_lost_where_data_is_uneven(sizes: list[list[int]], data: str, accumulate: int) -> None:
    setting = Setting(sizes, data=data, accumulate=accumulate, options={"uneven_data": True})
    for rank in assert_trained_as_one_process(setting):
        assert rank.num_batches == max(map(len, sizes))


def test_a_generator_is_extended_too() -> None:
    assert_trained_as_one_process(Setting(UNEVEN, data="generator", num_epochs=1, options={"uneven_data": True}))


def test_uneven_data_is_weighed() -> None:
    assert_trained_as_one_process(
        Setting([[4, 2, 4, 1], [3, 5]], data="stream", options={"uneven_data": True, "gradient_weight": "batch_size"})
    )


def test_a_rank_without_data_adds_nothing_to_batch_statistics() -> None:
    assert_trained_as_one_process(Setting(UNEVEN, data="stream", batchnorm=True, options={"uneven_data": True}))


def test_even_data_is_not_touched_by_the_option() -> None:
    for rank in assert_trained_as_one_process(Setting(EVEN, data="stream", options={"uneven_data": True})):
        assert rank.num_batches == 5


@pytest.mark.parametrize(("stopped", "data"), [(0, "iterable"), (1, "stream"), (0, "sized")])
def test_the_rank_that_stops_is_named_on_every_rank(stopped: int, data: str) -> None:
    sizes = UNEVEN if stopped == 1 else UNEVEN[::-1]
    text = (
        f"OutOfStepError: Rank {stopped} has no more data in epoch 0, while rank {1 - stopped} goes on after 3 batches."
        " Give every rank the same number of batches, or pass `uneven_data=True` to the strategy: a rank that has run"
        " out then takes part with weight zero until all have."
    )
    assert run_on_ranks(refusal, setting=Setting(sizes, data=data)) == [text] * 2


def test_a_rank_that_is_in_the_next_epoch_is_named_where_data_is_not_watched() -> None:
    setting = Setting(UNEVEN, data="several", validates=False)
    for text in run_on_ranks(refusal, setting=setting):
        assert text.startswith("OutOfStepError: Rank 1 has no more data in epoch 0, while rank 0 goes on after 4 batch")


def test_a_rank_without_any_data_is_named() -> None:
    text = "ValueError: Rank 1 has no training data at all. `uneven_data` needs at least one batch on every rank."
    setting = Setting([[4], []], data="stream", options={"uneven_data": True})
    assert run_on_ranks(refusal, setting=setting) == [text] * 2


def test_several_loaders_are_refused() -> None:
    text = (
        "ValueError: `uneven_data` works with one training dataloader, not with several. Combine them in one dataset."
    )
    setting = Setting(EVEN, data="several", options={"uneven_data": True})
    assert run_on_ranks(refusal, setting=setting) == [text] * 2


@for_each(("data", "kind"), [("stream", "DataLoader"), ("sized", "DataLoader")])
def test_a_watched_loader_keeps_its_class(data: str, kind: str) -> None:
    for rank in run_on_ranks(fit, setting=Setting(EVEN, data=data)):
        assert rank.loader_type == kind


def test_a_loader_with_a_distributed_sampler_is_left_alone() -> None:
    assert run_on_ranks(loader_with_a_distributed_sampler) == [True, True]
