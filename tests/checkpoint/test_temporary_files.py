"""A save that is killed loses itself at most, and the next one removes what it has left: that, and nothing else."""

from __future__ import annotations

import glob
import os
import random
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_bucketddp.checkpoint import atomic_file
from lightning_bucketddp.processes import pid_scope, process_start_time
from tests.support.forks import PROCESSES, child
from tests.support.jobs import checkpoint as jobs

NUM_KILLS = 15
# Until one of them has hit a file that is being written.
MAX_KILLS = 100


@pytest.fixture(params=["disk", "memory"])
def directories(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two empty directories on different file systems."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        if os.stat(memory).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("the temporary directory of the tests is in /dev/shm already")
        yield (tmp_path, Path(memory)) if request.param == "disk" else (Path(memory), tmp_path)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.sampled(1)
def test_a_killed_save_loses_itself_at_most_and_leaves_nothing_for_long(
    in_background: bool, directories: tuple[Path, Path]
) -> None:
    directory, tmpdir = directories
    path = str(directory / "model.ckpt")
    moments = random.Random(0)
    number = 1
    num_left = 0
    jobs.save_numbered(number, path)
    for num_kills in range(MAX_KILLS):
        if num_kills >= NUM_KILLS and num_left > 0:
            break
        job = {"path": path, "first": number + 1, "in_background": in_background, "tmpdir": str(tmpdir)}
        with child(jobs.save_for_ever, **job) as (process, pipe):
            number = pipe.recv()
            time.sleep(moments.uniform(0, 0.04))
            process.kill()
            process.join()
            with suppress(EOFError, OSError):  # nothing more, or half a message
                while True:
                    number = pipe.recv()
        # Once `save` has returned the checkpoint is there; in the background, the one before.
        assert number - in_background <= jobs.number_in(path) <= number + 1
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None  # all checksums
        number = jobs.number_in(path)
        num_left += any(name.endswith(".tmp") for name in os.listdir(directory))
        jobs.save_numbered(number, str(directory / "other.ckpt"))
        assert sorted(os.listdir(directory)) == ["model.ckpt", "other.ckpt"]
        assert os.listdir(tmpdir) == []
    assert num_left > 0  # or nothing was shown


def test_a_temporary_file_is_hidden_and_its_living_writer_keeps_it(tmp_path: Path) -> None:
    resume = PROCESSES.Event()
    with child(jobs.save_slowly, path=str(tmp_path / "slow.ckpt"), resume=resume) as (_, pipe):
        assert pipe.recv() == "begun"
        assert glob.glob(f"{tmp_path}/*") == []
        assert len(os.listdir(tmp_path)) == 1
        jobs.save_numbered(1, str(tmp_path / "other.ckpt"))
        resume.set()
        assert pipe.recv() == "saved"
    assert sorted(os.listdir(tmp_path)) == ["other.ckpt", "slow.ckpt"]
    assert jobs.number_in(str(tmp_path / "slow.ckpt")) == 7


def named(directory: Path, *, numbering: str, pid: int, start_time: int, hours_old: float = 0) -> Path:
    """The temporary file of such a process."""
    path = directory / f".bucketddp-{numbering}-{pid}-{start_time}-01234567.tmp"
    path.touch()
    os.utime(path, (time.time() - 3600 * hours_old,) * 2)
    return path


OURS = pid_scope()
OTHERS = "0123456789abcdef"


# A process of another host or container may have any number, also that of a living one here, or of none.
@pytest.mark.parametrize("pid", [os.getpid(), 999_999_999], ids=["ours", "none"])
def test_the_file_of_a_writer_elsewhere_goes_when_it_was_silent_for_an_hour(pid: int, tmp_path: Path) -> None:
    recent = named(tmp_path, numbering=OTHERS, pid=pid, start_time=1, hours_old=0.9)
    old = named(tmp_path, numbering=OTHERS, pid=pid, start_time=2, hours_old=1.1)
    jobs.save_numbered(1, str(tmp_path / "model.ckpt"))
    assert recent.exists()
    assert not old.exists()


def test_a_process_that_has_got_the_number_of_a_writer_is_not_the_writer(tmp_path: Path) -> None:
    start_time = process_start_time(os.getpid())
    writing = named(tmp_path, numbering=OURS, pid=os.getpid(), start_time=start_time)
    earlier = named(tmp_path, numbering=OURS, pid=os.getpid(), start_time=start_time - 1)
    jobs.save_numbered(1, str(tmp_path / "model.ckpt"))
    assert writing.exists()
    assert not earlier.exists()


def test_a_writer_that_was_killed_is_gone_before_its_parent_notices(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        start_time = process_start_time(process.pid)
        left = named(tmp_path, numbering=OURS, pid=process.pid, start_time=start_time)
        jobs.save_numbered(1, str(tmp_path / "model.ckpt"))
        assert left.exists()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # has ended, and its parent has not been told
        jobs.save_numbered(2, str(tmp_path / "model.ckpt"))
        assert not left.exists()


def test_nothing_else_is_removed_and_what_cannot_be_is_no_error(tmp_path: Path) -> None:
    for name in (".model.ckpt.17.tmp", ".bucketddp-notes.tmp", f"{atomic_file.temporary_name()}.bak"):
        (tmp_path / name).touch()
    (tmp_path / f".bucketddp-{OURS}-999999999-1-01234567.tmp").mkdir()
    before = set(os.listdir(tmp_path))
    jobs.save_numbered(1, str(tmp_path / "model.ckpt"))
    assert set(os.listdir(tmp_path)) == {*before, "model.ckpt"}
