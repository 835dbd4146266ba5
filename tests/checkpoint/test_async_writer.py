"""Checkpoints are written while training goes on, one at a time; what fails is heard of; nothing is removed early."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_bucketddp.checkpoint.async_writer import CheckpointWriter, snapshot_of
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


# --- Snapshots


def saved(checkpoint: Any) -> tuple[list[bytes], str]:
    """What `torch.save` writes: each storage, and what comes of it when it is loaded again."""
    file = io.BytesIO()
    torch.save(checkpoint, file)
    with zipfile.ZipFile(file) as archive:
        storages = [archive.read(name) for name in archive.namelist() if "/data/" in name]
    file.seek(0)
    return storages, repr(torch.load(file, weights_only=False))


def checkpoint_of_many_kinds() -> dict[str, Any]:
    linear, storage = nn.Linear(3, 3), torch.arange(1000.0)
    linear.bias.requires_grad_(False)
    return {
        "state_dict": {"tied": linear.weight, "again": linear.weight, **linear.state_dict()},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.rand(3, 3)}}}],
        "views": [storage[:10], storage[500:].view(50, 10).T],
        "not a leaf": linear.weight * 2,
        "dtypes": [torch.ones(3, dtype=dtype) for dtype in (torch.bfloat16, torch.bool, torch.int64, torch.complex64)],
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.empty(0, 4),
        "channels_last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "storage": torch.ones(7).untyped_storage(),
        "callbacks": {"best": {"path": "a.ckpt", "scores": [1.0, 2.0]}},
    }


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # what a bare storage is loaded as
def test_a_snapshot_saves_to_the_same_file() -> None:
    checkpoint = checkpoint_of_many_kinds()
    assert saved(snapshot_of(checkpoint)) == saved(checkpoint)


def test_later_changes_do_not_reach_a_snapshot() -> None:
    weight, scores, options = torch.ones(3), [1], {"lr": 0.1}
    expected = saved({"weight": weight, "scores": scores, "options": options})
    snapshot = snapshot_of({"weight": weight, "scores": scores, "options": options})
    weight.zero_()
    scores.append(2)
    options["lr"] = 0.2
    assert saved(snapshot) == expected
