"""Checkpoints through the Trainer: those of `ddp` and ours are one, and every rank learns of a failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.scripts.checkpoints import fit_and_save, resume, save, save_in_background, save_on_full_disk, use_own_plugin

STATE = ["state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"]
ADVICE = "Check the free space, the quota and the permissions of its directory, or save to another one."


def state_in(path: Path) -> dict[str, Any]:
    checkpoint = torch.load(path, weights_only=False)
    return {name: checkpoint[name] for name in STATE}


def assert_same_state(path: Path, expected: Path) -> None:
    torch.testing.assert_close(state_in(path), state_in(expected), rtol=0, atol=0)


@pytest.mark.parametrize(("first", "second"), [("ddp", "bucketddp"), ("bucketddp", "ddp"), ("bucketddp", "bucketddp")])
def test_a_resumed_run_equals_an_uninterrupted_one(first: str, second: str, tmp_path: Path) -> None:
    run_on_ranks(fit_and_save, strategy=first, max_epochs=1, save_to=tmp_path / "1.ckpt")
    run_on_ranks(
        fit_and_save, strategy=second, max_epochs=3, save_to=tmp_path / "3.ckpt", resume_from=tmp_path / "1.ckpt"
    )
    run_on_ranks(fit_and_save, strategy="ddp", max_epochs=3, save_to=tmp_path / "expected.ckpt")
    assert_same_state(tmp_path / "3.ckpt", tmp_path / "expected.ckpt")


@pytest.mark.parametrize(("first", "second"), [("ddp", "bucketddp"), ("bucketddp", "ddp"), ("bucketddp", "bucketddp")])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_checkpoint_resumes_at_another_world_size(
    before: int, after: int, first: str, second: str, tmp_path: Path
) -> None:
    run_on_ranks(fit_and_save, world_size=before, strategy=first, max_epochs=1, save_to=tmp_path / "before.ckpt")
    run_on_ranks(
        fit_and_save,
        world_size=after,
        strategy=second,
        max_epochs=1,  # which the checkpoint has reached
        save_to=tmp_path / "after.ckpt",
        resume_from=tmp_path / "before.ckpt",
    )
    assert_same_state(tmp_path / "after.ckpt", tmp_path / "before.ckpt")


def test_a_plugin_of_the_user_writes_and_reads(tmp_path: Path) -> None:
    rank_zero, rank_one = run_on_ranks(use_own_plugin, path=tmp_path / "model.ckpt")
    assert rank_zero == ["save model.ckpt", "load model.ckpt"]
    assert rank_one == ["load model.ckpt"]


def test_checkpoints_are_written_in_the_background(tmp_path: Path) -> None:
    assert run_on_ranks(save_in_background, directory=tmp_path, max_epochs=2) == [None, None]
    assert [state_in(tmp_path / f"epoch={epoch}.ckpt")["global_step"] for epoch in range(2)] == [10, 20]


# With one epoch nothing comes after the failure at which it could be raised, but the end.
@pytest.mark.parametrize("max_epochs", [1, 2])
def test_a_failure_in_the_background_is_raised_on_every_rank(max_epochs: int, tmp_path: Path) -> None:
    rank_zero, rank_one = run_on_ranks(
        save_in_background, directory=tmp_path, max_epochs=max_epochs, room_for_bytes=1000
    )
    assert rank_zero.startswith(f"CheckpointWriteError: Could not write checkpoint `{tmp_path}/epoch=")
    assert rank_zero.endswith(f".ckpt`: File too large. {ADVICE}")
    assert rank_one == f"{rank_zero} (on rank 0)"


def test_a_full_disk_is_named_on_every_rank_and_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    rank_zero, rank_one = run_on_ranks(save_on_full_disk, directory=tmp_path, room_for_bytes=1000)
    assert (
        rank_zero
        == f"CheckpointWriteError: Could not write checkpoint `{tmp_path}/last.ckpt`: File too large. {ADVICE}"
    )
    assert rank_one == f"{rank_zero} (on rank 0)"
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    assert state_in(tmp_path / "last.ckpt")["global_step"] == 10


def test_a_path_that_cannot_be_written_is_named_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "model.ckpt"
    rank_zero, rank_one = run_on_ranks(save, path=path)
    assert rank_zero == f"CheckpointWriteError: Could not write checkpoint `{path}`: Not a directory. {ADVICE}"
    assert rank_one == f"{rank_zero} (on rank 0)"


def test_a_truncated_checkpoint_is_named_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    torch.save({"state_dict": {"weight": torch.ones(1000)}}, path)
    path.write_bytes(path.read_bytes()[:2000])
    text = (
        f"CheckpointReadError: Cannot read checkpoint `{path}`: it is cut short or damaged (2,000 bytes that are not a"
        " complete archive). No intact checkpoint is beside it. Copy it again from where it came from, or resume from"
        " another one."
    )
    assert run_on_ranks(resume, path=path) == [text, text]
