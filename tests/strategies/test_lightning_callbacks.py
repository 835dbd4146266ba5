"""Lightning's callbacks and tuners do with `bucketddp` what they do with `ddp`, on two processes."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.ranks import run_on_ranks
from tests.support.scripts.lightning_callbacks import (
    MONITORS,
    find_batch_size,
    find_learning_rate,
    save_on_exception,
    stop_early,
    train_with_monitor,
    write_predictions,
)

NUM_BATCHES = 10
saves_on_exception = pytest.mark.skipif(
    "save_on_exception" not in inspect.signature(ModelCheckpoint).parameters,
    reason="this Lightning's `ModelCheckpoint` does not save on exceptions",
)


# Rank 1's metric rises in the third epoch, which stops both ranks; the mean of both rises in the fifth.
@pytest.mark.parametrize(("shared", "epochs"), [(False, 3), (True, 5)])
def test_early_stopping_stops_all_ranks_at_the_step_of_ddp(shared: bool, epochs: int) -> None:
    ours = run_on_ranks(stop_early, strategy="bucketddp", shared=shared)
    ddp = run_on_ranks(stop_early, strategy="ddp", shared=shared)
    assert ours == [ddp[0]] * 2
    assert ours[0]["steps"] == epochs * NUM_BATCHES


@pytest.mark.parametrize("monitor", list(MONITORS))
@pytest.mark.sampled(2)
def test_training_under_a_callback_equals_ddp(monitor: str, tmp_path: Path) -> None:
    ours = run_on_ranks(train_with_monitor, monitor=monitor, strategy="bucketddp", directory=tmp_path)
    ddp = run_on_ranks(train_with_monitor, monitor=monitor, strategy="ddp", directory=tmp_path)
    assert ours == ddp
    assert ours[0]["weights"] == ours[1]["weights"]


def test_predictions_are_written_like_with_ddp(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ddp").mkdir()
    ours = run_on_ranks(write_predictions, strategy="bucketddp", directory=tmp_path / "ours")
    assert ours == run_on_ranks(write_predictions, strategy="ddp", directory=tmp_path / "ddp")
    assert ours[0]["written"] != ours[1]["written"]  # each rank has its own samples


@pytest.mark.parametrize("by_callback", [True, False], ids=["callback", "tuner"])
def test_the_learning_rate_that_is_found_equals_ddp(by_callback: bool, tmp_path: Path) -> None:
    ours = run_on_ranks(find_learning_rate, strategy="bucketddp", by_callback=by_callback, directory=tmp_path)
    ddp = run_on_ranks(find_learning_rate, strategy="ddp", by_callback=by_callback, directory=tmp_path)
    assert ours == [ddp[0]] * 2
    assert ours[0]["rate"] != 0.05


@pytest.mark.parametrize("by_callback", [True, False], ids=["callback", "tuner"])
def test_looking_for_a_batch_size_is_refused_as_with_ddp(by_callback: bool) -> None:
    ours = run_on_ranks(find_batch_size, strategy="bucketddp", by_callback=by_callback)
    assert ours == run_on_ranks(find_batch_size, strategy="ddp", by_callback=by_callback)
    assert all("not supported with distributed strategies" in error for error in ours)


@pytest.mark.parametrize("by", ["OnExceptionCheckpoint", pytest.param("ModelCheckpoint", marks=saves_on_exception)])
def test_an_exception_on_all_ranks_leaves_the_checkpoint_of_ddp(by: str, tmp_path: Path) -> None:
    ours = run_on_ranks(save_on_exception, strategy="bucketddp", by=by, directory=tmp_path / "ours")
    ddp = run_on_ranks(save_on_exception, strategy="ddp", by=by, directory=tmp_path / "ddp")
    for rank in ours:
        assert rank["step"] == 3
        assert rank["weights"] == ddp[0]["weights"]
        torch.testing.assert_close(rank["saved"], ddp[0]["saved"], rtol=0, atol=0)
