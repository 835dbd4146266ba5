"""The file in which a run writes down its checkpoints."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest
import torch

from lightning_bucketddp.checkpoint.run_record import RunEnd, RunRecord


def save(path: Path, number: int) -> str:
    path.parent.mkdir(exist_ok=True)
    torch.save({"number": torch.tensor(number)}, path)
    return str(path)


def numbers(record: RunRecord) -> list[str]:
    return [Path(saved.path).name for saved in record.newest_first() if saved.is_there()]


def test_checkpoints_are_told_from_the_newest_on(tmp_path: Path) -> None:
    for step, name in enumerate(["a.ckpt", "last.ckpt", "b.ckpt", "last.ckpt", "c.ckpt"]):
        # A process for each of them: what counts is the file.
        RunRecord(str(tmp_path), "run").add(save(tmp_path / name, step), step=step, epoch=0)
    record = RunRecord(str(tmp_path), "run")
    assert numbers(record) == ["c.ckpt", "last.ckpt", "b.ckpt", "a.ckpt"]
    record.remove(str(tmp_path / "c.ckpt"))
    (tmp_path / "b.ckpt").unlink()
    save(tmp_path / "a.ckpt", 4711)
    assert numbers(record) == ["last.ckpt"]
    assert numbers(RunRecord(str(tmp_path), "another")) == []


def test_a_run_that_ended_goes_on_when_it_saves_again(tmp_path: Path) -> None:
    record = RunRecord(str(tmp_path), "run")
    end = RunEnd(step=7, num_epochs=1, seconds=0.0, was_stopped=True)
    record.set_end(end)
    record.add(save(tmp_path / "final.ckpt", 1), step=7, epoch=1, is_over=True)
    assert record.end == end
    record.add(save(tmp_path / "a.ckpt", 1), step=8, epoch=1)
    assert record.end is None


@pytest.mark.parametrize("root", ["{}/run[lr=1]", "memory://bucketddp{}/run[lr=1]"])
def test_what_a_run_began_with_stays_until_there_is_another_checkpoint(root: str, tmp_path: Path) -> None:
    record = RunRecord(root.format(tmp_path), "run")
    with fsspec.open(record.start_path, "wb", auto_mkdir=True) as file:
        torch.save({"number": torch.tensor(1)}, file)
    record.add(record.start_path, step=0, epoch=0)
    record.add(str(tmp_path), step=1, epoch=0)  # a plugin may save directories
    assert [saved.step for saved in record.newest_first() if saved.is_there()] == [0]
    record.add(save(tmp_path / "a.ckpt", 1), step=1, epoch=0)
    assert [saved.step for saved in record.newest_first()] == [1]
    assert not fsspec.open(record.start_path).fs.exists(record.start_path)


def test_a_directory_may_be_moved(tmp_path: Path) -> None:
    record = RunRecord(str(tmp_path / "here"), "run")
    record.add(save(tmp_path / "here" / "a.ckpt", 1), step=1, epoch=0)
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert numbers(RunRecord(str(tmp_path / "there"), "run")) == ["a.ckpt"]


def test_a_record_may_be_remote() -> None:
    files = fsspec.filesystem("memory")
    with files.open("/run/a.ckpt", "wb") as file:
        torch.save({"number": torch.tensor(1)}, file)
    record = RunRecord("memory://run", "run")
    record.add("memory://run/a.ckpt", step=1, epoch=0)
    assert numbers(record) == ["a.ckpt"]
    files.pipe_file("/run/a.ckpt", b"something else")
    assert numbers(record) == []


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe"])
def test_a_damaged_record_is_an_empty_one(damage: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = RunRecord(str(tmp_path), "run")
    record.add(save(tmp_path / "a.ckpt", 1), step=1, epoch=0)
    (tmp_path / ".bucketddp" / "runs" / "run.json").write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert record.newest_first() == []
    assert "because it is damaged" in caplog.text


def test_a_record_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".bucketddp").write_text("a file in the place of the directory")
    with caplog.at_level(logging.WARNING):
        RunRecord(str(tmp_path), "run").add(save(tmp_path / "a.ckpt", 1), step=1, epoch=0)
    assert "`auto_resume` will not find the newest checkpoint" in caplog.text
