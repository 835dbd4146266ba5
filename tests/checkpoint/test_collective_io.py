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
from tests.support.ranks import device, on_ranks, run_on_ranks


def raised_on_ranks(write: Callable[[], None], *, path: str | None = None) -> tuple[str, str, int | None] | None:
    """The class, the text and the number of what this rank raises when all of them write."""
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


@on_ranks()
def test_only_rank_zero_writes_and_a_failed_write_raises_on_every_rank(tmp_path: Path) -> None:
    calls, path = [], str(tmp_path / "model.ckpt")
    rank = Collectives(device()).rank

    def write(path: str) -> None:
        calls.append(path)
        save_numbered(1, path)

    assert raised_on_ranks(lambda: write(path), path=path) is None
    text = (
        f"Could not write checkpoint `{path}/new.ckpt`: Not a directory. Check the free space, the quota and the"
        f" permissions of its directory, or save to another one.{' (on rank 0)' if rank else ''}"
    )
    raised = raised_on_ranks(lambda: write(f"{path}/new.ckpt"), path=f"{path}/new.ckpt")
    assert raised == ("CheckpointWriteError", text, errno.ENOTDIR)
    assert calls == ([path, f"{path}/new.ckpt"] if rank == 0 else [])
    assert jobs.number_in(path) == 1


@on_ranks()
def test_the_error_of_a_plugin_stays_its_own_on_rank_zero_and_an_interrupt_is_not_turned_into_an_error() -> None:
    def fail() -> None:
        raise ValueError("the storage is on holiday")

    def interrupt() -> None:
        raise KeyboardInterrupt

    rank, text = Collectives(device()).rank, "the storage is on holiday"
    assert raised_on_ranks(fail, path="a.ckpt") == (
        ("CheckpointWriteError", f"Could not write checkpoint `a.ckpt`: ValueError: {text} (on rank 0)", None)
        if rank
        else ("ValueError", text, None)
    )
    if rank == 0:  # the others stay out: they are not told
        with pytest.raises(KeyboardInterrupt):
            write_on_rank_zero(interrupt, Collectives(device()), path="a.ckpt")


def test_without_a_process_group_the_write_just_happens(saved: str) -> None:
    write_on_rank_zero(lambda: save_numbered(2, saved), None, path=saved)
    assert jobs.number_in(saved) == 2


def test_draining_waits_for_writes_in_the_background(saved: str) -> None:
    checkpoint_io = AsyncCheckpointIO(BucketDDPCheckpointIO())
    for number in (2, 3):
        checkpoint_io.save_checkpoint(jobs.numbered_checkpoint(number), saved)
    drain(checkpoint_io)
    assert jobs.number_in(saved) == 3


def fail_in_background(path: str) -> list[Any]:
    """Everything that one save in the background raises: when saving, when drained, and when drained again."""
    checkpoint_io = AsyncCheckpointIO(BucketDDPCheckpointIO())

    def save() -> None:
        with raised_once(checkpoint_io):
            checkpoint_io.save_checkpoint({}, path)

    # A fast failure is raised by the save already.
    steps = [raised_on_ranks(step) for step in (save, lambda: drain(checkpoint_io), lambda: drain(checkpoint_io))]
    return [raised for raised in steps if raised is not None]


def fail_at_a_later_save(path: str) -> list[Any]:
    """A failure in the background that shows at a later save, with more saves waiting; then the trainer's teardown."""
    checkpoint_io = AsyncCheckpointIO(BucketDDPCheckpointIO())

    def save_until_it_raises() -> None:
        with raised_once(checkpoint_io):
            while True:
                checkpoint_io.save_checkpoint({}, path)

    raised = raised_on_ranks(save_until_it_raises)
    checkpoint_io.teardown()
    return [raised]


@pytest.mark.parametrize("job", [fail_in_background, fail_at_a_later_save])
def test_a_failure_in_the_background_raises_once_on_every_rank(job: Callable[..., Any], saved: str) -> None:
    path = f"{saved}/new.ckpt"
    for rank, [(kind, text, number)] in enumerate(run_on_ranks(job, path=path)):
        assert (kind, number) == ("CheckpointWriteError", errno.ENOTDIR)
        assert text.startswith(f"Could not write checkpoint `{path}`: Not a directory.")
        assert text.endswith("(on rank 0)") == (rank != 0)
