"""`async_checkpoints=True`: training goes on while rank zero writes, and every rank hears when that fails."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_on_ranks
from tests.support.saved_state import ADVICE, assert_same_state, state_in
from tests.support.scripts import async_checkpoints as jobs
from tests.support.scripts.fabrics import ROOTS


def test_training_goes_on_and_the_weights_of_the_step_are_saved(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    ranks = run_on_ranks(jobs.train_while_writing, path=path)
    # Nothing was written before training had gone on for three batches.
    assert all(rank["num_batches_without_file"] >= 3 for rank in ranks)
    assert ranks[0]["saved"] == ranks[1]["saved"] != ranks[0]["final"] == ranks[1]["final"]
    checkpoint = torch.load(path, weights_only=True)
    assert {name: value.tolist() for name, value in checkpoint["state_dict"].items()} == ranks[0]["saved"]
    assert checkpoint["global_step"] == jobs.SAVED_AFTER
    [momentum, *_] = checkpoint["optimizer_states"][0]["state"].values()
    assert momentum["momentum_buffer"].shape == (8, 4)
    assert [rank["stats"].num_saves for rank in ranks] == [1, 0]
    assert ranks[0]["stats"].snapshot_s > 0
    assert ranks[0]["stats"].writing_s == 0


# With two ranks the news travel with the next step; in one process there is nobody to tell. After the last batch
# there is no step any more, only the end.
@pytest.mark.parametrize(
    ("world_size", "options", "saved_after", "trained"),
    [
        (1, {}, 2, 2),
        (1, {"gradient_weight": "batch_size"}, 2, 3),
        (2, {}, 2, 3),
        (2, {"uneven_data": True}, 2, 3),
        (2, {}, 10, 10),
    ],
)
@pytest.mark.sampled(2)
def test_a_failed_write_is_raised_on_every_rank_at_the_next_step_or_at_the_end(
    world_size: int, options: dict[str, Any], saved_after: int, trained: int, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "model.ckpt"
    ranks = run_on_ranks(jobs.fail_while_training, world_size=world_size, path=path, after=saved_after, **options)
    text = f"CheckpointWriteError: Could not write checkpoint `{path}`: Not a directory. {ADVICE}"
    assert ranks == [(text, trained), (f"{text} (on rank 0)", trained)][:world_size]


def test_an_exception_waits_for_what_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    ranks = run_on_ranks(jobs.raise_while_writing, path=path)
    assert ranks[0] == ("RuntimeError: a mistake of the user's", True)
    assert ranks[1][0] == ranks[0][0]
    assert state_in(path)["global_step"] == jobs.SAVED_AFTER


def test_a_save_after_an_exception_is_not_left_to_the_background(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "model.ckpt"
    rank_zero, rank_one = run_on_ranks(jobs.fail_to_save_on_exception, path=path)
    assert rank_zero == f"CheckpointWriteError: Could not write checkpoint `{path}`: Not a directory. {ADVICE}"
    assert rank_one == f"{rank_zero} (on rank 0)"


def test_the_checkpoint_before_stays_when_the_next_one_cannot_be_written(tmp_path: Path) -> None:
    rank_zero, rank_one = run_on_ranks(jobs.fill_the_disk, directory=tmp_path)
    path = tmp_path / "epoch=1.ckpt"
    assert rank_zero == f"CheckpointWriteError: Could not write checkpoint `{path}`: File too large. {ADVICE}"
    assert rank_one == f"{rank_zero} (on rank 0)"
    assert [file.name for file in tmp_path.iterdir()] == ["epoch=0.ckpt"]
    assert state_in(tmp_path / "epoch=0.ckpt")["global_step"] == 10


def test_the_same_files_are_written_as_otherwise_and_the_time_is_reported(tmp_path: Path) -> None:
    reports = {}
    for name, is_async in (("async", True), ("sync", False)):
        reports[name] = run_on_ranks(jobs.fit_with_model_checkpoint, directory=tmp_path / name, is_async=is_async)
    files = sorted(file.name for file in (tmp_path / "sync").iterdir())
    assert len(files) == 2 + 1 + 7
    assert sorted(file.name for file in (tmp_path / "async").iterdir()) == files
    for file in files:
        assert_same_state(tmp_path / "async" / file, tmp_path / "sync" / file)
    number = r"(\d+\.\d{3})"
    in_background = (
        rf" \(snapshot {number} s, waiting {number} s, writing 0\.000 s\), wrote for {number} s in the background"
    )
    for name, [[line], on_rank_one] in reports.items():
        assert on_rank_one == []
        expected = rf"; \d+ checkpoints held up training for {number} s{in_background if name == 'async' else ''}\.$"
        match = re.search(expected, " ".join(line.split()))
        assert match is not None
        assert all(float(seconds) > 0 for seconds in match.groups()[:2])


def test_a_link_never_points_to_what_is_not_written_yet(tmp_path: Path) -> None:
    ranks = run_on_ranks(jobs.fit_with_model_checkpoint, directory=tmp_path, is_async=True, save_last="link")
    why, line = ranks[0]
    assert why == (
        "bucketddp: checkpoints are not written in the background, because of `save_last='link'`: the link would point"
        " to a file that is not there yet. Pass `save_last=True` instead."
    )
    assert "in the background" not in line
    assert (tmp_path / "last.ckpt").is_symlink()
    assert state_in(tmp_path / "last.ckpt")["global_step"] == 30


def test_only_training_goes_on_meanwhile(tmp_path: Path) -> None:
    assert run_on_ranks(jobs.save_around_training, directory=tmp_path) == [[True] * 3] * 2


def test_what_is_loaded_while_training_goes_on_is_written_first(tmp_path: Path) -> None:
    assert run_on_ranks(jobs.load_while_training, path=tmp_path / "model.ckpt") == [jobs.SAVED_AFTER] * 2


def test_two_ways_to_write_in_the_background_are_refused() -> None:
    text = (
        "ValueError: `async_checkpoints=True` and the plugin `AsyncCheckpointIO` both write in the background. Pass one"
        " of them."
    )
    assert run_on_ranks(jobs.with_plugin_that_does_the_same) == [text, text]


# --- Fabric


@pytest.mark.parametrize("root", ROOTS)
def test_fabric_saves_the_weights_of_the_step(root: str, tmp_path: Path) -> None:
    for rank, result in enumerate(run_on_ranks(jobs.save_with_fabric, path=tmp_path / "model.ckpt", root=root)):
        assert result["loaded"] == result["saved"] != [[0, 0], [0, 0]]
        assert result["stats"].num_saves == (rank == 0)
        assert (result["stats"].snapshot_s > 0) == (rank == 0)


@pytest.mark.parametrize("ends", [False, True])
def test_fabric_raises_what_failed_on_every_rank(ends: bool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    rank_zero, rank_one = run_on_ranks(jobs.fail_with_fabric, path=tmp_path / "file", ends=ends)
    assert rank_zero.startswith(
        f"CheckpointWriteError: Could not write checkpoint `{tmp_path}/file/below/a file`: Not a"
    )
    assert rank_one == f"{rank_zero} (on rank 0)"
