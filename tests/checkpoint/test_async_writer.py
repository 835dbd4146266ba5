"""Checkpoints are written while training goes on, one at a time; what fails is heard of; nothing is removed early."""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPCheckpointIO
from lightning_bucketddp.checkpoint.async_writer import CheckpointWriter
from lightning_bucketddp.checkpoint.checkpoint_io import AtomicCheckpointIO, CheckpointWriteError
from tests.support.jobs import checkpoint as jobs
from tests.support.programs import REPOSITORY

WAIT_S = 20  # for what comes at once, or never


class HeldStorage:
    """Storage that takes a checkpoint only when told to."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.released = threading.Event()
        self.num_begun = 0

    def write(self, checkpoint: dict[str, Any]) -> None:
        self.num_begun += 1
        assert self.released.wait(WAIT_S)
        AtomicCheckpointIO().save_checkpoint(checkpoint, self.path)


@pytest.fixture
def writer() -> Iterator[CheckpointWriter]:
    writer = CheckpointWriter()
    yield writer
    writer.drain()


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[HeldStorage]:
    storage = HeldStorage(str(tmp_path / "model.ckpt"))
    yield storage
    storage.released.set()


def save(number: int, writer: CheckpointWriter, storage: HeldStorage, *, in_background: bool = True) -> None:
    writer.save(jobs.numbered_checkpoint(number), storage.write, path=storage.path, in_background=in_background)


def fail(writer: CheckpointWriter, storage: HeldStorage) -> str:
    """Let a write fail in the background; what shall be raised."""
    path = f"{storage.path}/below/a/file"
    Path(storage.path).touch()

    def write(checkpoint: dict[str, Any]) -> None:
        assert storage.released.wait(WAIT_S)
        AtomicCheckpointIO().save_checkpoint(checkpoint, path)

    writer.save({}, write, path=path, in_background=True)
    return f"Could not write checkpoint `{path}`: Not a directory"


def test_a_remote_path_is_written_in_the_background(writer: CheckpointWriter) -> None:
    path, checkpoint_io = "memory://bucketddp/background/model.ckpt", BucketDDPCheckpointIO()
    writer.save({"number": 1}, partial(checkpoint_io.save_checkpoint, path=path), path=path, in_background=True)
    writer.drain()
    assert checkpoint_io.load_checkpoint(path) == {"number": 1}


def test_the_next_save_waits_for_the_one_before(writer: CheckpointWriter, storage: HeldStorage) -> None:
    save(1, writer, storage)
    second = threading.Thread(target=save, args=(2, writer, storage))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    assert storage.num_begun == 1
    storage.released.set()
    second.join(WAIT_S)
    writer.drain()
    assert storage.num_begun == 2
    assert jobs.number_in(storage.path) == 2
    assert writer.stats.waiting_s > 0.2


def test_a_failure_is_logged_at_once_and_raised_once(
    writer: CheckpointWriter, storage: HeldStorage, caplog: pytest.LogCaptureFixture
) -> None:
    text = fail(writer, storage)
    assert not writer.has_failed
    writer.raise_failure()  # nothing yet, and it does not wait
    storage.released.set()
    with pytest.raises(CheckpointWriteError, match=text) as raised:
        writer.drain()
    assert raised.value.errno == errno.ENOTDIR
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert text in " ".join(caplog.text.split())
    assert not writer.has_failed
    writer.raise_failure()
    writer.drain()


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_after_a_failure_saves_and_raises_it(
    in_background: bool, writer: CheckpointWriter, storage: HeldStorage
) -> None:
    text = fail(writer, storage)
    storage.released.set()
    with pytest.raises(CheckpointWriteError, match=text):
        save(2, writer, storage, in_background=in_background)
    writer.drain()
    assert jobs.number_in(storage.path) == 2


def test_the_error_of_a_plugin_becomes_one_that_names_the_path(writer: CheckpointWriter) -> None:
    def write(_: Any) -> None:
        raise ValueError("the storage is on holiday")

    writer.save({}, write, path="a.ckpt", in_background=True)
    text = "Could not write checkpoint `a.ckpt`: ValueError: the storage is on holiday"
    with pytest.raises(CheckpointWriteError, match=text) as raised:
        writer.drain()
    assert isinstance(raised.value.__cause__, ValueError)


def test_what_cannot_be_saved_is_refused_by_the_save_itself(writer: CheckpointWriter, storage: HeldStorage) -> None:
    with pytest.raises(CheckpointWriteError, match=f"Could not write checkpoint `{storage.path}`: .*lambda"):
        writer.save({"fn": lambda: 0}, storage.write, path=storage.path, in_background=True)
    assert storage.num_begun == 0


def test_an_older_checkpoint_is_removed_after_the_newer_one_is_written(
    writer: CheckpointWriter, storage: HeldStorage, tmp_path: Path
) -> None:
    old = tmp_path / "old.ckpt"
    old.touch()
    save(2, writer, storage)
    writer.remove(old.unlink, path=old)
    assert old.exists()
    storage.released.set()
    writer.drain()
    assert os.listdir(tmp_path) == ["model.ckpt"]
    writer.remove(Path(storage.path).unlink, path=storage.path)  # nothing to wait for
    assert os.listdir(tmp_path) == []


def test_an_older_checkpoint_stays_if_the_newer_one_cannot_be_written(
    writer: CheckpointWriter, storage: HeldStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = tmp_path / "old.ckpt"
    old.touch()
    text = fail(writer, storage)
    writer.remove(old.unlink, path=old)
    storage.released.set()
    with pytest.raises(CheckpointWriteError, match=text):
        writer.drain()
    assert old.exists()
    assert f"checkpoint `{old}` is kept, because the one that replaces it was not written" in caplog.text


def test_what_cannot_be_removed_is_logged(
    writer: CheckpointWriter, storage: HeldStorage, caplog: pytest.LogCaptureFixture
) -> None:
    save(1, writer, storage)
    writer.remove(Path("/nonexistent.ckpt").unlink, path="/nonexistent.ckpt")
    storage.released.set()
    writer.drain()
    assert "could not remove checkpoint `/nonexistent.ckpt`" in caplog.text


def test_a_save_that_is_not_in_the_background_waits_too_and_the_time_is_counted(
    writer: CheckpointWriter, storage: HeldStorage
) -> None:
    save(1, writer, storage)
    threading.Timer(0.2, storage.released.set).start()
    save(2, writer, storage, in_background=False)
    assert jobs.number_in(storage.path) == 2
    writer.drain()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bucketddp checkpoints")]
    stats = writer.stats
    assert stats.num_saves == 2
    assert min(stats.waiting_s, stats.background_s, stats.snapshot_s, stats.writing_s) > 0
    assert stats.held_up_s == stats.snapshot_s + stats.waiting_s + stats.writing_s
    seconds = r"\d+\.\d{3} s"
    assert re.fullmatch(
        f"2 checkpoints held up training for {seconds} \\(snapshot {seconds}, waiting {seconds}, writing {seconds}\\),"
        f" wrote for {seconds} in the background",
        stats.describe(),
    )


PROGRAM = """
import sys, time
import torch
from lightning_bucketddp.checkpoint.checkpoint_io import AtomicCheckpointIO
from lightning_bucketddp.checkpoint.async_writer import CheckpointWriter

def write(checkpoint):
    time.sleep(1)
    AtomicCheckpointIO().save_checkpoint(checkpoint, sys.argv[1])

CheckpointWriter().save({"weight": torch.ones(3)}, write, path=sys.argv[1], in_background=True)
raise SystemExit(7)
"""


def test_a_program_that_ends_waits_for_what_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    process = subprocess.run([sys.executable, "-c", PROGRAM, path], cwd=REPOSITORY, timeout=WAIT_S * 3, check=False)
    assert process.returncode == 7
    assert torch.load(path, weights_only=True)["weight"].tolist() == [1, 1, 1]
