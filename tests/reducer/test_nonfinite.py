"""Losses and gradients that are not finite: found in their step, with rank and parameter, and kept from the weights."""

from __future__ import annotations

import math
from itertools import cycle
from typing import Any

import pytest
import torch

from tests.support.cases import for_each
from tests.support.jobs import nonfinite
from tests.support.jobs.nonfinite import WAYS, Bad, Outcome, train
from tests.support.ranks import run_on_ranks

WHAT_HELPS = "To find the cause, look at the data of that rank, clip gradients or lower the learning rate"
RAISED = (
    "Not finite in backward 2: {}. No optimizer has used it, the weights are as they were. "
    f"{WHAT_HELPS}; or pass `on_nonfinite='skip'` to the strategy to leave such steps out."
)
WARNED = (
    "bucketddp: not finite in {}: {}. It goes into the weights of all ranks; `on_nonfinite='raise'` or"
    f" `on_nonfinite='skip'` prevents that. {WHAT_HELPS}."
)
SKIPPED = f"bucketddp: not finite in {{}}: {{}}. The optimizer's step is skipped on all ranks. {WHAT_HELPS}."


def trained(world_size: int = 2, **options: Any) -> list[Outcome]:
    return run_on_ranks(train, world_size=world_size, **options)


def raised_on_all(**options: Any) -> str:
    """The error of all ranks, which is one."""
    [error] = {rank.error for rank in trained(on_nonfinite="raise", **options)}
    return error


# --- What is found


WAYS_AND_VALUES = list(zip(WAYS, cycle([math.nan, math.inf, -math.inf])))


@for_each(("way", "value"), WAYS_AND_VALUES)
def test_a_gradient_is_named_with_its_rank(way: str, value: float) -> None:
    error = raised_on_all(bad=Bad("2.weight", value), **WAYS[way])
    assert error == RAISED.format("the gradient of `2.weight` on rank 1")


@for_each(("way", "value"), WAYS_AND_VALUES)
def test_a_loss_is_told_with_its_rank(way: str, value: float) -> None:
    assert raised_on_all(bad=Bad(None, value), **WAYS[way]) == RAISED.format(f"the loss on rank 1 ({value})")


@for_each(
    ("case", "parameter"),
    [
        ("sparse_embedding", "embedding.weight"),
        ("complex", "shift"),
        ("many_dtypes", "layers.1.weight"),
        ("many_dtypes", "layers.2.bias"),
        ("unused_on_one_rank", "left.bias"),
        ("checkpoint_reentrant", "blocks.1.0.weight"),
        ("partly_frozen", "0.bias"),
    ],
)
def test_every_kind_of_gradient_is_looked_at(case: str, parameter: str) -> None:
    bad = Bad(parameter)
    assert raised_on_all(case=case, bad=bad) == RAISED.format(f"the gradient of `{parameter}` on rank 1")


@for_each("parameter", ["0.bias", None])
def test_one_process_alone_is_looked_at(parameter: str | None) -> None:
    [rank] = trained(world_size=1, bad=Bad(parameter, ranks=[0]), on_nonfinite="raise")
    assert rank.error == RAISED.format(
        "the loss on rank 0 (nan)" if parameter is None else "the gradient of `0.bias` on rank 0"
    )


@pytest.mark.parametrize("reads_late", [False, True])
def test_one_process_alone_warns_of_its_loss_and_does_not_look_at_gradients(reads_late: bool) -> None:
    [rank] = trained(world_size=1, bad=Bad(None, ranks=[0]), on_nonfinite="warn", reads_late=reads_late)
    assert rank.num_nonfinite == 1
    assert "not finite in backward 2: the loss on rank 0 (nan)" in rank.warnings[0]
    assert rank.num_reductions == 0
    [rank] = trained(world_size=1, bad=Bad("0.bias", ranks=[0], step=2), on_nonfinite="warn", reads_late=reads_late)
    assert rank.warnings == []


def test_all_ranks_are_listed() -> None:
    bad = Bad("4.bias", ranks=[0, 2])
    assert {rank.error for rank in trained(world_size=3, bad=bad, on_nonfinite="raise")} == {
        RAISED.format("the gradient of `4.bias` on ranks 0, 2")
    }
    assert {rank.error for rank in trained(world_size=3, bad=Bad(None, ranks=[0, 2]), on_nonfinite="raise")} == {
        RAISED.format("the loss on rank 0 (nan), rank 2 (nan)")
    }


def test_the_first_backward_is_looked_at() -> None:
    assert "in backward 1: the gradient of `0.weight` on rank 1" in raised_on_all(bad=Bad("0.weight", step=0))


@for_each("parameter", ["2.weight", None])
@for_each("micro_batch", [0, 1, 2])
def test_every_micro_batch_is_looked_at(micro_batch: int, parameter: str | None) -> None:
    error = raised_on_all(bad=Bad(parameter, micro_batch=micro_batch), micro_batches=3)
    assert error == RAISED.format(
        "the loss on rank 1 (nan)" if parameter is None else "the gradient of `2.weight` on rank 1"
    )


def test_gradients_are_looked_at_without_the_loss() -> None:
    assert "the gradient of `2.weight` on rank 1" in raised_on_all(bad=Bad("2.weight"), tells_loss=False)


@pytest.mark.parametrize("parameter", ["2.weight", None])
@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_is_looked_at_on_request(world_size: int, parameter: str | None) -> None:
    for rank in trained(world_size, bad=Bad(parameter), on_nonfinite=None):
        assert (rank.error, rank.warnings, rank.num_nonfinite) == ("", [], 0)


def test_a_gradient_that_is_too_large_for_the_wire_is_found() -> None:
    assert raised_on_all(bad=Bad("2.weight", 1e5), reduce_dtype="bf16") == ""
    error = raised_on_all(bad=Bad("2.weight", 1e5), reduce_dtype="fp16")
    assert error == RAISED.format("the gradient of `2.weight` on rank 1")


@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_largest_finite_numbers_are_finite(dtype: torch.dtype) -> None:
    assert run_on_ranks(nonfinite.largest_numbers, dtype=dtype) == [0, 0]


def test_a_gradient_is_counted_once() -> None:
    assert run_on_ranks(nonfinite.parameter_that_is_no_longer_used) == [[0, 1, 1, 1]] * 2


# --- What it costs


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(4)
def test_no_collective_is_added(way: str) -> None:
    # Each step beside a hook, and beside what travels as int8.
    flags_travel_alone = 3 if "hook" in way or "int8" in way else 0
    for bad in (None, Bad("2.weight"), Bad(None)):
        for rank in trained(bad=bad, on_nonfinite="skip", **WAYS[way]):
            others = 0 if "int8" in way else rank.num_reductions
            assert rank.num_all_reduces == others + flags_travel_alone


# --- What is done


@pytest.mark.parametrize("parameter", ["2.weight", None])
def test_a_warning_names_the_step_on_rank_zero(parameter: str | None) -> None:
    rank_zero, rank_one = trained(bad=Bad(parameter))
    what = "the loss on rank 1 (nan)" if parameter is None else "the gradient of `2.weight` on rank 1"
    assert rank_zero.warnings[0] == WARNED.format("backward 2", what)
    assert rank_one.warnings == []


def test_warnings_become_rare() -> None:
    # The weights are not finite after the second of twenty steps.
    rank_zero, _ = trained(bad=Bad("2.weight"), steps=20)
    assert rank_zero.num_nonfinite == 19
    what = "the loss on rank 0 (nan), rank 1 (nan)"
    assert rank_zero.warnings[1:] == [WARNED.format("backward 11 (10 steps so far)", what)]


BAD_AND_MICRO_BATCHES = cycle([("2.weight", 1), (None, 1), ("2.weight", 3), (None, 3)])


@for_each(("way", "parameter", "micro_batches"), [(way, *next(BAD_AND_MICRO_BATCHES)) for way in WAYS])
def test_a_skipped_step_leaves_no_trace(way: str, parameter: str | None, micro_batches: int) -> None:
    bad = Bad(parameter, micro_batch=0)
    ranks = trained(bad=bad, steps=4, micro_batches=micro_batches, on_nonfinite="skip", **WAYS[way])
    expected = trained(steps=4, micro_batches=micro_batches, leaves_out=[1], **WAYS[way])
    for rank in ranks:
        assert rank.steps_withheld == [1]
        assert rank.num_nonfinite == 1
        assert all(torch.equal(ours, other) for ours, other in zip(rank.weights, expected[0].weights, strict=True))
    what = "the loss on rank 1 (nan)" if parameter is None else "the gradient of `2.weight` on rank 1"
    assert ranks[0].warnings == [SKIPPED.format("backward 2", what)]


def test_a_skipped_sparse_gradient_leaves_no_trace() -> None:
    ranks = trained(case="sparse_embedding", bad=Bad("embedding.weight"), steps=4, on_nonfinite="skip")
    expected = trained(case="sparse_embedding", steps=4, leaves_out=[1])
    for rank in ranks:
        assert rank.steps_withheld == [1]
        assert all(torch.equal(ours, other) for ours, other in zip(rank.weights, expected[0].weights, strict=True))


@pytest.mark.parametrize("step", [1, 4], ids=["before_it_compresses", "when_it_compresses"])
def test_a_hook_with_a_memory_does_not_keep_it(step: int) -> None:
    ranks = trained(bad=Bad("2.weight", step=step), steps=8, on_nonfinite="skip", hook_with_state="power_sgd")
    for rank in ranks:
        assert rank.steps_withheld == [step]
        assert all(weight.isfinite().all() for weight in rank.weights)
    assert "`2.weight`" in ranks[0].warnings[0]


def test_only_the_optimizers_whose_gradients_are_bad_are_kept_from_stepping() -> None:
    assert run_on_ranks(nonfinite.players_in_turns, both_backwards_first=False) == [["critic 1"]] * 2
    assert run_on_ranks(nonfinite.players_in_turns, both_backwards_first=True) == [["generator 1", "critic 1"]] * 2


# --- Late, as on a GPU


@pytest.mark.parametrize("step", [1, 2])
def test_a_late_warning_names_step_and_parameter(step: int) -> None:
    # After the last step, nothing but the end follows.
    rank_zero, _ = trained(bad=Bad("2.weight", step=step), steps=3, reads_late=True)
    assert rank_zero.warnings[0] == WARNED.format(f"backward {step + 1}", "the gradient of `2.weight` on rank 1")


def test_a_late_warning_names_the_bucket_where_clipping_has_spread_it() -> None:
    rank_zero, _ = trained(bad=Bad("4.bias"), reads_late=True, clips=True)
    assert rank_zero.warnings[0].startswith("bucketddp: not finite in backward 2: the gradients of ")
    assert "`4.bias`" in rank_zero.warnings[0]
    assert "`0.weight`" not in rank_zero.warnings[0]
