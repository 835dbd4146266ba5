"""Rank zero writes checkpoints, at once or in the background, and every rank learns when that fails."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPCheckpointIO
from lightning_bucketddp.checkpoint.async_writer import drain
from lightning_bucketddp.checkpoint.checkpoint_io import write_on_rank_zero
from tests.support.jobs import checkpoint as jobs
from tests.support.ranks import run_on_ranks


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """Checkpoint number 1."""
    path = str(tmp_path / "model.ckpt")
    jobs.save_numbered(1, path)
    return path


def test_only_rank_zero_writes(tmp_path: Path) -> None:
    path = str(tmp_path / "model.ckpt")
    ranks = run_on_ranks(jobs.save_on_rank_zero, world_size=2, path=path)
    assert ranks == [{"raised": None, "calls": 1}, {"raised": None, "calls": 0}]
    assert jobs.number_in(path) == 1


def test_a_failed_write_raises_on_every_rank(saved: str) -> None:
    ranks = run_on_ranks(jobs.save_on_rank_zero, world_size=2, path=f"{saved}/new.ckpt")
    text = (
        f"Could not write checkpoint `{saved}/new.ckpt`: Not a directory. Check the free space, the quota and the"
        " permissions of its directory, or save to another one."
    )
    assert [rank["raised"] for rank in ranks] == [
        ("CheckpointWriteError", text, errno.ENOTDIR),
        ("CheckpointWriteError", f"{text} (on rank 0)", errno.ENOTDIR),
    ]
    assert jobs.number_in(saved) == 1


def test_the_error_of_a_plugin_stays_its_own_on_rank_zero() -> None:
    text = "the storage is on holiday"
    assert run_on_ranks(jobs.fail_on_rank_zero, world_size=2, path="a.ckpt") == [
        ("ValueError", text, None),
        ("CheckpointWriteError", f"Could not write checkpoint `a.ckpt`: ValueError: {text} (on rank 0)", None),
    ]


def test_an_interrupt_is_not_turned_into_an_error() -> None:
    assert run_on_ranks(jobs.interrupt_rank_zero, world_size=2, path="a.ckpt") == [True, True]


def test_without_a_process_group_the_write_just_happens(saved: str) -> None:
    write_on_rank_zero(lambda: jobs.save_numbered(2, saved), None, path=saved)
    assert jobs.number_in(saved) == 2


def test_draining_waits_for_writes_in_the_background(saved: str) -> None:
    checkpoint_io = AsyncCheckpointIO(BucketDDPCheckpointIO())
    for number in (2, 3):
        checkpoint_io.save_checkpoint(jobs.numbered_checkpoint(number), saved)
    drain(checkpoint_io)
    assert jobs.number_in(saved) == 3


@pytest.mark.parametrize("job", [jobs.fail_in_background, jobs.fail_at_a_later_save])
def test_a_failure_in_the_background_raises_once_on_every_rank(job: Callable[..., Any], saved: str) -> None:
    path = f"{saved}/new.ckpt"
    ranks = run_on_ranks(job, world_size=2, async_io=AsyncCheckpointIO, base_io=BucketDDPCheckpointIO, path=path)
    for rank, [(kind, text, number)] in enumerate(ranks):
        assert (kind, number) == ("CheckpointWriteError", errno.ENOTDIR)
        assert text.startswith(f"Could not write checkpoint `{path}`: Not a directory.")
        assert text.endswith("(on rank 0)") == (rank != 0)
