"""Compiled modules: the same numbers, and communication while their backward runs."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp.config import MIB, ReducerConfig
from lightning_bucketddp.reducer.graphs import graphs_split
from tests.support.ranks import run_on_ranks
from tests.support.scripts.compiled import NUM_LAYERS, NUM_STEPS, Compiled, fit, train_with_fabric

WAYS = ["module", "submodule", "submodule in place", "in configure_model"]


def assert_overlap(events: list[str]) -> None:
    """A bucket leaves between any two parts of the backward."""
    parts = [position for position, event in enumerate(events) if event.startswith("part")]
    assert len(parts) == NUM_LAYERS
    for part, next_part in pairwise(parts):
        assert [event for event in events[part:next_part] if event.startswith("bucket")], events


def assert_same(rank: Compiled, expected: Compiled, **tolerance: Any) -> None:
    torch.testing.assert_close(rank.weights, expected.weights, **(tolerance or {"rtol": 0, "atol": 0}))


def num_parts(events: list[str]) -> int:
    return len([event for event in events if event.startswith("part")])


@pytest.fixture(scope="module")
def eager() -> list[Compiled]:
    return run_on_ranks(fit, compiled="not")


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.sampled(2)
def test_buckets_leave_between_the_parts_of_a_compiled_backward(compiled: str, eager: list[Compiled]) -> None:
    for rank, expected in zip(run_on_ranks(fit, compiled=compiled), eager, strict=True):
        assert len(rank.events_by_step) == NUM_STEPS
        for events in rank.events_by_step[1:]:  # the first backward is observed
            assert_overlap(events)
        assert_same(rank, expected)


def test_nothing_is_compiled_again_after_the_first_step() -> None:
    # Validation comes before (sanity check) and after training, and shares no graph with it.
    for rank in run_on_ranks(fit, compiled="submodule in place", max_epochs=2):
        assert rank.graphs_by_step == [1 + NUM_LAYERS] * 2 * NUM_STEPS
        assert rank.num_graphs == 1 + NUM_LAYERS


def test_accumulation_overlaps_in_the_last_micro_batch() -> None:
    eager = run_on_ranks(fit, compiled="not", accumulate_grad_batches=2, limit_train_batches=4)
    ranks = run_on_ranks(fit, compiled="module", accumulate_grad_batches=2, limit_train_batches=4)
    for rank, expected in zip(ranks, eager, strict=True):
        alone, together = rank.events_by_step[1][:NUM_LAYERS], rank.events_by_step[1][NUM_LAYERS:]
        assert alone == [f"part {part}" for part in range(NUM_LAYERS)]
        assert_overlap(together)
        assert_same(rank, expected)


def test_dynamic_shapes_overlap(eager: list[Compiled]) -> None:
    for rank, expected in zip(run_on_ranks(fit, compiled="module", dynamic=True), eager, strict=True):
        assert_overlap(rank.events_by_step[-1])
        assert_same(rank, expected)


@pytest.mark.skipif(
    "has_higher_order_op" in DDPOptimizer.compile_fn.__code__.co_names,
    reason="this torch cannot split a graph that has checkpointing in it",
)
def test_activation_checkpointing_inside_a_compiled_module_overlaps(eager: list[Compiled]) -> None:
    for rank, expected in zip(run_on_ranks(fit, compiled="module", checkpointed=True), eager, strict=True):
        assert_overlap(rank.events_by_step[-1])
        assert_same(rank, expected)


@pytest.mark.parametrize("how", [{"options": {"overlap": False}}, {"optimize_ddp": False}], ids=str)
def test_a_graph_stays_whole_where_no_split_is_wanted(how: dict[str, Any]) -> None:
    for rank in run_on_ranks(fit, compiled="submodule", max_steps=2, **how):
        assert [num_parts(events) for events in rank.events_by_step] == [1, 1]


def test_a_graph_stays_whole_on_one_rank() -> None:
    # With an option that gives the reducer something to do there.
    (rank,) = run_on_ranks(fit, compiled="submodule", max_steps=2, world_size=1, options={"on_nonfinite": "raise"})
    assert [num_parts(events) for events in rank.events_by_step] == [1, 1]


def test_a_graph_without_a_backward_stays_whole() -> None:
    for rank in run_on_ranks(fit, compiled="teacher", max_steps=1, num_sanity_val_steps=0):
        assert rank.num_graphs == 1


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same_up_to_rounding(eager: list[Compiled], tmp_path: Path) -> None:
    how: dict[str, Any] = {"compile_with": "inductor", "limit_val_batches": 0, "cache": tmp_path}
    for rank, expected in zip(run_on_ranks(fit, compiled="submodule", timeout_s=150, **how), eager, strict=True):
        assert_same(rank, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reapply", [True, False])
def test_fabric_overlaps(reapply: bool) -> None:
    eager = run_on_ranks(train_with_fabric, compiled=False)
    ranks = run_on_ranks(train_with_fabric, compiled=True, reapply=reapply)
    for rank, expected in zip(ranks, eager, strict=True):
        for events in rank.events_by_step[1:]:
            assert_overlap(events)
        assert rank.num_graphs == NUM_LAYERS + 1  # evaluation has one graph, in one part
        assert_same(rank, expected)


@pytest.mark.parametrize(("bucket_cap_mb", "part_mb"), [(3.0, 3), (None, 25), ([1.0, 2.0, 5.0], 5), (0.5, 1)], ids=str)
def test_parts_are_as_large_as_buckets_but_not_smaller_than_torch_allows(bucket_cap_mb: Any, part_mb: int) -> None:
    with graphs_split(ReducerConfig(bucket_cap_mb=bucket_cap_mb), world_size=2):
        cap = DistributedDataParallel._get_active_ddp_module().bucket_bytes_cap
    assert cap == part_mb * MIB
    DDPOptimizer(cap, lambda *_: None)  # type: ignore[arg-type]  # which checks it


def active() -> Any:
    return DistributedDataParallel._active_ddp_module


def fail_inside() -> None:
    with graphs_split(ReducerConfig(), world_size=2):
        raise ZeroDivisionError


def test_what_was_there_before_comes_back_in_any_case() -> None:
    with graphs_split(ReducerConfig(), world_size=2):
        outer = active()
        with pytest.raises(ZeroDivisionError):
            fail_inside()
        assert active() is outer
    assert active() is None
