"""Rank zero writes checkpoints, at once or in the background, and every rank learns when that fails."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPCheckpointIO
from lightning_bucketddp.checkpoint.async_writer import drain, raised_once
from lightning_bucketddp.checkpoint.checkpoint_io import write_on_rank_zero
from lightning_bucketddp.comm.collectives import Collectives
from tests.support.jobs import checkpoint as jobs
from tests.support.jobs.checkpoint import save_numbered
from tests.support.ranks import device, run_on_ranks


def save_on_rank_zero(path: str) -> dict[str, Any]:
    calls = []

    def write() -> None:
        calls.append(path)
        save_numbered(1, path)

    return {"raised": _raised_by(write, path=path), "calls": len(calls)}


def fail_on_rank_zero(path: str) -> tuple[str, str, int | None] | None:
    def write() -> None:
        raise ValueError("the storage is on holiday")  # as a user's own plugin may

    return _raised_by(write, path=path)


def interrupt_rank_zero(path: str) -> bool:
    """Whether a KeyboardInterrupt comes through on rank zero. The others stay out: they are not told."""
    collectives = Collectives(device())
    if collectives.rank != 0:
        return True

    def write() -> None:
        raise KeyboardInterrupt

    try:
        write_on_rank_zero(write, collectives, path=path)
    except KeyboardInterrupt:
        return True
    return False


def fail_in_background(async_io: type, base_io: type, path: str) -> list[tuple[str, str, int | None]]:
    """Everything that one save in the background raises: when saving, when drained, and when drained again."""
    checkpoint_io = async_io(base_io())

    def save() -> None:
        with raised_once(checkpoint_io):
            checkpoint_io.save_checkpoint({}, path)

    # A fast failure is raised by the save already.
    steps = (_raised_by(step) for step in (save, lambda: drain(checkpoint_io), lambda: drain(checkpoint_io)))
    return [raised for raised in steps if raised is not None]


def fail_at_a_later_save(async_io: type, base_io: type, path: str) -> list[tuple[str, str, int | None] | None]:
    """A failure in the background that shows at a later save, with more saves waiting; then the trainer's teardown."""
    checkpoint_io = async_io(base_io())

    def save_until_it_raises() -> None:
        with raised_once(checkpoint_io):
            while True:
                checkpoint_io.save_checkpoint({}, path)

    raised = _raised_by(save_until_it_raises)
    checkpoint_io.teardown()
    return [raised]


def _raised_by(write: Callable[[], None], *, path: str | None = None) -> tuple[str, str, int | None] | None:
    try:
        write_on_rank_zero(write, Collectives(device()), path=path)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "errno", None)
    return None


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """Checkpoint number 1."""
    path = str(tmp_path / "model.ckpt")
    save_numbered(1, path)
    return path


def test_only_rank_zero_writes(tmp_path: Path) -> None:
    path = str(tmp_path / "model.ckpt")
    ranks = run_on_ranks(save_on_rank_zero, world_size=2, path=path)
    assert ranks == [{"raised": None, "calls": 1}, {"raised": None, "calls": 0}]
    assert jobs.number_in(path) == 1


def test_a_failed_write_raises_on_every_rank(saved: str) -> None:
    ranks = run_on_ranks(save_on_rank_zero, world_size=2, path=f"{saved}/new.ckpt")
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
    assert run_on_ranks(fail_on_rank_zero, world_size=2, path="a.ckpt") == [
        ("ValueError", text, None),
        ("CheckpointWriteError", f"Could not write checkpoint `a.ckpt`: ValueError: {text} (on rank 0)", None),
    ]


def test_an_interrupt_is_not_turned_into_an_error() -> None:
    assert run_on_ranks(interrupt_rank_zero, world_size=2, path="a.ckpt") == [True, True]


def test_without_a_process_group_the_write_just_happens(saved: str) -> None:
    write_on_rank_zero(lambda: save_numbered(2, saved), None, path=saved)
    assert jobs.number_in(saved) == 2


def test_draining_waits_for_writes_in_the_background(saved: str) -> None:
    checkpoint_io = AsyncCheckpointIO(BucketDDPCheckpointIO())
    for number in (2, 3):
        checkpoint_io.save_checkpoint(jobs.numbered_checkpoint(number), saved)
    drain(checkpoint_io)
    assert jobs.number_in(saved) == 3


@pytest.mark.parametrize("job", [fail_in_background, fail_at_a_later_save])
def test_a_failure_in_the_background_raises_once_on_every_rank(job: Callable[..., Any], saved: str) -> None:
    path = f"{saved}/new.ckpt"
    ranks = run_on_ranks(job, world_size=2, async_io=AsyncCheckpointIO, base_io=BucketDDPCheckpointIO, path=path)
    for rank, [(kind, text, number)] in enumerate(ranks):
        assert (kind, number) == ("CheckpointWriteError", errno.ENOTDIR)
        assert text.startswith(f"Could not write checkpoint `{path}`: Not a directory.")
        assert text.endswith("(on rank 0)") == (rank != 0)
