"""Ranks that train on the same data are warned, and those that only look so are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_bucketddp.data.first_batches import digest_of
from tests.support.ranks import run_on_ranks
from tests.support.scripts.same_data import fit

SPLIT_ROWS = "Let the Trainer split it (`use_distributed_sampler=True`), or pass a `DistributedSampler` to the loader."
SPLIT_STREAM = (
    "Pass `shard_iterable=True` to the strategy, which gives each rank a part of the stream, or split it in the"
    " dataset; if it is random, `rank_seeds=True` gives each rank numbers of its own."
)
SPLIT_BATCHES = "Give each rank a part of the data, by `trainer.global_rank` and `trainer.world_size`."


def warning(who: str, loaders: str, remedy: str) -> str:
    return (
        f"bucketddp: {who} train on the same data: {loaders} began with equal batches there. A step of several ranks"
        f" then learns no more than a step of one. {remedy}"
    )


ROWS = "`train_dataloader` (`DataLoader` over `TensorDataset`)"
STREAM = "`train_dataloader` (`DataLoader` over `Numbers`)"


@pytest.mark.parametrize(
    ("kind", "loaders", "remedy"),
    [
        ("rows", ROWS, SPLIT_ROWS),
        ("shuffled rows", ROWS, SPLIT_ROWS),
        ("stream", STREAM, SPLIT_STREAM),
        ("random stream", STREAM, SPLIT_STREAM),
        ("no DataLoader", "`train_dataloader` (`Batches`)", SPLIT_BATCHES),
        ("several loaders", f"{ROWS} and {STREAM}", f"{SPLIT_ROWS} {SPLIT_STREAM}"),
    ],
)
@pytest.mark.sampled(4)
def test_the_same_data_on_all_ranks_is_warned_of_once(kind: str, loaders: str, remedy: str) -> None:
    first, second = run_on_ranks(fit, kind=kind)
    assert first.texts == [warning("All ranks", loaders, remedy)]
    assert second.texts == []
    assert first.num_steps == second.num_steps == 3


@pytest.mark.parametrize(
    "options",
    [{"accumulate_grad_batches": 2}, {"options": {"gradient_weight": "batch_size", "uneven_data": True}}],
    ids=["accumulated", "weighed"],
)
def test_it_is_noticed_in_other_exchanges_too(options: dict[str, Any]) -> None:
    first, _ = run_on_ranks(fit, kind="stream", **options)
    assert first.texts == [warning("All ranks", STREAM, SPLIT_STREAM)]


def test_the_ranks_with_the_same_data_are_named() -> None:
    first, *_ = run_on_ranks(fit, world_size=3, kind="equal on two of three ranks")
    assert first.texts == [warning("Ranks 0, 2", STREAM, SPLIT_STREAM)]


@pytest.mark.parametrize(
    ("kind", "num_steps"),
    [
        # equal by nature
        ("zeros", 3),
        ("one sample", 3),
        ("equal in the first step only", 2),
        # different: the first step says so
        ("another stream on each rank", 1),
        # nothing to compare
        ("texts", 0),
    ],
)
def test_nothing_is_said_of_other_data(kind: str, num_steps: int) -> None:
    for rank in run_on_ranks(fit, kind=kind):
        assert rank.texts == []
        assert rank.num_steps == num_steps


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("rows", {"use_distributed_sampler": True}),
        ("stream", {"options": {"shard_iterable": True}}),
        ("rows", {"overfit_batches": 4}),
    ],
    ids=["sampler", "dealt", "overfit"],
)
def test_nothing_is_compared_where_data_is_split_or_meant_to_be_the_same(kind: str, options: dict[str, Any]) -> None:
    for rank in run_on_ranks(fit, kind=kind, **options):
        assert rank.texts == []
        assert rank.num_steps == 0


def test_one_process_has_nobody_to_compare_with() -> None:
    [alone] = run_on_ranks(fit, world_size=1, kind="rows", options={"gradient_weight": "batch_size"})
    assert (alone.texts, alone.num_steps) == ([], 0)


# --- Digests


@dataclass(slots=True)
class Pair:
    first: Any
    second: Any


BATCHES: dict[str, Any] = {
    "large": torch.arange(4 * 3 * 64 * 64.0).reshape(4, 3, 64, 64),
    "long": torch.arange(5000),
    "a view": torch.arange(1000.0).reshape(10, 100).t()[::3],
    "expanded": torch.arange(3.0).expand(5000, 3),
    "bfloat16": torch.arange(9.0).bfloat16(),
    "bool": torch.tensor([True, False]),
    "a number": torch.tensor(3),
    "nested": {"a": [torch.arange(3), (torch.arange(2), "text")], "b": None},
    "dataclass": Pair(torch.arange(3), 5),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_digest_is_of_the_content_and_fits_in_a_float(kind: str) -> None:
    batch = BATCHES[kind]
    digest = digest_of(batch)
    assert digest == digest_of(_map(batch, torch.clone)) == int(float(digest)) > 0
    assert digest != digest_of(_map(batch, lambda tensor: ~tensor if tensor.dtype == torch.bool else tensor + 1))
    assert digest != digest_of(batch, before=1)


@pytest.mark.parametrize(
    "batch",
    [torch.eye(3).to_sparse(), torch.ones(3, dtype=torch.complex64).conj(), torch.ones(3, 0)],
    ids=["sparse", "conjugated", "empty"],
)
def test_a_tensor_that_cannot_be_read_is_no_error(batch: Tensor) -> None:
    assert digest_of(batch) == digest_of(batch)


@pytest.mark.parametrize("batch", ["text", 5, None, ["a", 1], torch.ones(3, device="meta")], ids=str)
def test_a_batch_without_tensors_has_no_digest(batch: Any) -> None:
    assert digest_of(batch) == 0
    assert digest_of(batch, before=7) == 7


def _map(tree: Any, function: Any) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Pair):
        return Pair(_map(tree.first, function), tree.second)
    if isinstance(tree, dict):
        return {key: _map(value, function) for key, value in tree.items()}
    return type(tree)(_map(value, function) for value in tree) if isinstance(tree, list | tuple) else tree
