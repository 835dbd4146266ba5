"""Hooks that are left out, memory that is given back, gradients that are foreseen: with real ranks."""

from __future__ import annotations

import pytest

from lightning_bucketddp.reducer.bucket_set import _GIVE_BACK_ON
from tests.support.jobs.parity import Training, parity_with_mean
from tests.support.jobs.watching import (
    a_late_gradient,
    memory_is_given_back,
    none,
    one_each,
    one_for_all,
    orders,
    other_backwards,
    unused_layers,
)
from tests.support.ranks import run_on_ranks
from tests.support.scripts.watched_fits import fit

FORWARD = [0, 1, 2, 3, 4, 5]
GIVES_BACK = pytest.mark.skipif(not _GIVE_BACK_ON, reason="an older torch cannot tell who uses memory: it is kept")


def test_in_one_order_each_bucket_has_one_hook() -> None:
    for watched in run_on_ranks(orders, orders_by_step=[FORWARD] * 5):
        assert 1 < watched.num_buckets < 6
        assert watched.hooks == [12, 12, *[watched.num_buckets] * 3]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_another_order_has_all_gradients_counted_again(micro_batches: int) -> None:
    another = [5, 4, 3, 2, 1, 0]
    steps = [FORWARD] * 4 + [another, another, FORWARD]
    for watched in run_on_ranks(orders, orders_by_step=steps, micro_batches=micro_batches):
        assert watched.hooks[3] == watched.num_buckets
        assert watched.hooks[4:] == [12, 12, 12]


def test_a_gradient_that_comes_late_without_a_hook_is_found() -> None:
    for said in run_on_ranks(a_late_gradient):
        assert said.startswith("Gradient of "), said
        assert "arrived after its bucket" in said


@pytest.mark.parametrize(
    ("kind", "is_watching"),
    [("zeros", True), ("create_graph", False), ("unmarked", False), ("added_up", True)],
)
def test_other_backwards_are_right(kind: str, is_watching: bool) -> None:
    assert run_on_ranks(other_backwards, kind=kind) == [is_watching] * 2


@pytest.mark.parametrize(
    ("case", "micro_batches", "is_watching"),
    [("mlp", 1, True), ("mlp", 3, True), ("checkpoint_reentrant_shared", 1, False), ("unused_in_turns", 1, False)],
)
def test_hooks_are_left_out_where_it_is_safe(case: str, micro_batches: int, is_watching: bool) -> None:
    training = Training(micro_batches=micro_batches, bucket_cap_mb=0.001)
    for rank in run_on_ranks(parity_with_mean, case=case, training=training):
        assert rank.is_watching is is_watching


@GIVES_BACK
def test_memory_of_gradients_that_are_gone_is_given_back() -> None:
    for held in run_on_ranks(memory_is_given_back, kept="nothing"):
        assert len(held) == 4
        assert held == [0] * 4


@GIVES_BACK
@pytest.mark.parametrize("kept", ["gradient", "alias"])
def test_memory_of_a_gradient_that_is_kept_is_not(kept: str) -> None:
    for held in run_on_ranks(memory_is_given_back, kept=kept):
        assert held[0] > 0


def test_layers_unused_by_all_ranks_have_no_flags_read_and_buckets_leave_early() -> None:
    for outcome in run_on_ranks(unused_layers, left_out=one_for_all):
        assert outcome.flags_read == [1, 1, 0, 0, 0, 0, 0, 0]
        assert outcome.graph_was_right
        # In the third backward all ranks know that some miss gradients, and see that the graph tells which. Then
        # watching is tried, and given up.
        assert max(outcome.before_end[:3]) < outcome.num_buckets
        assert [outcome.before_end[step] for step in (3, 6, 7)] == [outcome.num_buckets] * 3


def test_layers_unused_by_one_rank_have_flags_read() -> None:
    for outcome in run_on_ranks(unused_layers, left_out=one_each):
        assert outcome.flags_read == [1] * 8


def test_a_comparison_that_lies_is_noticed() -> None:
    with pytest.raises(Exception, match=r"layers\.\d\.weight, step"):
        run_on_ranks(unused_layers, left_out=one_each, lie=True)


def test_a_graph_that_does_not_know_is_not_asked_again() -> None:
    for outcome in run_on_ranks(unused_layers, left_out=one_for_all, reentrant=True):
        assert outcome.graph_was_right is False


def test_nothing_is_compared_where_nothing_is_unused() -> None:
    for outcome in run_on_ranks(unused_layers, left_out=none):
        assert outcome.flags_read == [0] * 8
        assert outcome.graph_was_right is None


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_fit_leaves_hooks_out_and_trains_like_ddp(accumulate: int) -> None:
    ours = run_on_ranks(fit, like_ddp=False, accumulate=accumulate)
    theirs = run_on_ranks(fit, like_ddp=True, accumulate=accumulate)
    assert [rank["is_watching"] for rank in ours] == [True, True]
    assert [rank["weights"] for rank in ours] == [rank["weights"] for rank in theirs]


def test_manual_optimization_keeps_all_hooks() -> None:
    assert [rank["is_watching"] for rank in run_on_ranks(fit, like_ddp=False, manual=True)] == [False, False]
