"""Checkpoints are written in the background, one at a time; failures are raised; non-finite ones go elsewhere."""

from __future__ import annotations

import errno
import io
import logging
import math
import os
import subprocess
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_bucketddp.checkpoint.async_writer import (
    FINITE,
    INFINITE,
    NAN,
    CheckpointWriter,
    FiniteCheckpoints,
    nonfinite_weights,
    severities_of,
    snapshot_of,
)
from lightning_bucketddp.checkpoint.checkpoint_io import AtomicCheckpointIO, CheckpointWriteError
from tests.support import warm
from tests.support.cases import for_each
from tests.support.jobs import checkpoint as jobs
from tests.support.programs import REPOSITORY

WAIT_S = 20  # for what comes at once, or never


class HeldStorage:
    """Storage that takes a checkpoint only when it is released."""

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


def save(number: int, writer: CheckpointWriter, storage: HeldStorage) -> None:
    writer.save(jobs.numbered_checkpoint(number), storage.write, path=storage.path, in_background=True)


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
    writer: CheckpointWriter, storage: HeldStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = tmp_path / "old.ckpt"
    old.touch()
    save(2, writer, storage)
    writer.remove(old.unlink, path=old)
    writer.remove(old.unlink, path="nonexistent.ckpt")
    assert old.exists()
    storage.released.set()
    writer.drain()
    assert os.listdir(tmp_path) == ["model.ckpt"]
    assert "could not remove checkpoint `nonexistent.ckpt`" in caplog.text


def test_what_is_to_be_removed_is_gone_before_a_save_that_is_not_in_the_background(
    writer: CheckpointWriter, storage: HeldStorage
) -> None:
    storage.released.set()
    done: list[str] = []

    def remove() -> None:
        time.sleep(0.3)
        done.append("removed")

    save(1, writer, storage)
    writer.remove(remove, path="old.ckpt")
    writer.save({}, lambda _: done.append("saved"), path=storage.path, in_background=False)
    assert done == ["removed", "saved"]


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
    process = subprocess.run([warm.python(), "-c", PROGRAM, path], cwd=REPOSITORY, timeout=WAIT_S * 3, check=False)
    assert process.returncode == 7
    assert torch.load(path, weights_only=True)["weight"].tolist() == [1, 1, 1]


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


BAD = ["weight"]
DTYPES = ["float32", "float64", "float16", "bfloat16", "float8_e5m2", "complex64"]


class Weights(nn.Module):
    """One parameter of each dtype, all of them with the same elements."""

    def __init__(self, *elements: float) -> None:
        super().__init__()
        for name in DTYPES:
            weight = torch.tensor(elements).to(getattr(torch, name))
            self.register_parameter(f"as_{name}", nn.Parameter(weight, requires_grad=False))
        self.register_parameter("empty", nn.Parameter(torch.ones(0)))
        self.register_parameter("int64", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False))
        self.register_buffer("mask", torch.tensor(elements))
        self.norm = nn.BatchNorm1d(2)


@for_each(
    ("elements", "severity"),
    [
        ((1.0, -2.0), FINITE),
        ((1.0, math.inf), INFINITE),
        ((-math.inf, 1.0), INFINITE),
        ((math.inf, -math.inf), INFINITE),
        ((math.inf, math.nan), NAN),
        ((5e4, -5e4), FINITE),  # about as large as 16 bits can be
    ],
)
def test_weights_of_each_dtype_are_looked_at(elements: tuple[float, ...], severity: int) -> None:
    statistics = {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
    found = severities_of(Weights(*elements))
    assert {name: found.pop(name) for name in statistics} == dict.fromkeys(statistics, FINITE)
    names = [f"as_{name}" for name in DTYPES]
    assert found == dict.fromkeys(names, severity)


def test_what_was_no_better_at_the_start_does_not_count() -> None:
    module = nn.ParameterDict({name: torch.zeros(2) for name in ("a", "b", "c")})
    module["b"].data[0] = -math.inf
    at_start = severities_of(module)
    module["c"].data[0] = math.inf
    assert nonfinite_weights(module.state_dict(), module, at_start=at_start) == ["c"]
    module["b"].data[1] = math.nan
    assert nonfinite_weights(module.state_dict(), module, at_start=at_start) == ["b", "c"]
    assert nonfinite_weights({"b": module["b"], "other": module["b"]}, module, at_start=at_start) == ["b"]


def test_the_checkpoint_to_resume_from_is_one_that_can_be_resumed_from_and_was_written() -> None:
    checkpoints = FiniteCheckpoints()
    with pytest.raises(OSError, match="resume from one of them"):
        checkpoints.place("1.ckpt", BAD, refuses=True)
    with pytest.warns(UserWarning, match=r"(?s)written as\s+`nonfinite/1\.ckpt`.* No\s+finite one is known\.$"):
        checkpoints.place("1.ckpt", BAD, refuses=False)
    checkpoints.place("whole.ckpt", [], refuses=False)
    checkpoints.place("weights.ckpt", [], refuses=False, can_resume=False)
    checkpoints.place("failing.ckpt", [], refuses=False)
    with pytest.raises(ZeroDivisionError), checkpoints.known_unless_failing("failing.ckpt"):
        raise ZeroDivisionError
    with pytest.raises(OSError, match=r"resume from `whole\.ckpt`\.$"):
        checkpoints.place("2.ckpt", BAD, refuses=True)
