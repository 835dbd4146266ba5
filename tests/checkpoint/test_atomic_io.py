"""Checkpoint files are ordinary, complete or absent; a write that fails names the file and keeps the previous one."""

from __future__ import annotations

import errno
import glob
import importlib
import os
import pickle
import random
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPCheckpointIO
from lightning_bucketddp.checkpoint.atomic_file import temporary_name
from lightning_bucketddp.checkpoint.checkpoint_io import AtomicCheckpointIO, CheckpointWriteError, write_on_rank_zero
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.processes import pid_scope, process_start_time
from tests.support.cases import for_each
from tests.support.disks import forbidden_directory, not_as_root, small_disk
from tests.support.forks import PROCESSES, child
from tests.support.jobs import checkpoint as jobs
from tests.support.ranks import device, on_ranks, raised_by
from tests.support.scripts.checkpoints import ADVICE, full_disk


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """The only file in its directory: checkpoint number 1."""
    path = str(tmp_path / "model.ckpt")
    jobs.save_numbered(1, path)
    return path


def assert_only_number_one(path: str) -> None:
    """The previous checkpoint is intact and nothing else was left behind."""
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
    assert jobs.number_in(path) == 1


# --- What is written


@pytest.mark.parametrize(
    ("module", "fabric"),
    [
        ("trainer_lightning", "lightning.fabric"),
        ("fabric_lightning_fabric", "lightning_fabric"),
    ],
)
def test_each_root_has_a_checkpoint_io_that_can_be_pickled(module: str, fabric: str, tmp_path: Path) -> None:
    ours = importlib.import_module(f"lightning_bucketddp.bindings.{module}").BucketDDPCheckpointIO
    checkpoint_io = pickle.loads(pickle.dumps(ours()))
    assert isinstance(checkpoint_io, importlib.import_module(f"{fabric}.plugins").TorchCheckpointIO)
    checkpoint_io.save_checkpoint({"number": 1}, tmp_path / "model.ckpt")
    assert checkpoint_io.load_checkpoint(tmp_path / "model.ckpt") == {"number": 1}


def test_a_checkpoint_is_an_ordinary_one(saved: str) -> None:
    assert TorchCheckpointIO().load_checkpoint(saved)["number"] == 1
    torch.testing.assert_close(
        torch.load(saved, weights_only=True)["state_dict"], jobs.numbered_checkpoint(1)["state_dict"], rtol=0, atol=0
    )


@for_each("form", ["{}/new/dir/model.ckpt", "file://{}/new/model.ckpt", "model.ckpt"])
def test_any_local_path_is_written_and_loaded(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = form.format(tmp_path)
    BucketDDPCheckpointIO().save_checkpoint({"number": 1}, path)
    assert BucketDDPCheckpointIO().load_checkpoint(path) == {"number": 1}
    assert {file.name for file in tmp_path.rglob("*") if file.is_file()} == {"model.ckpt"}


def test_a_remote_path_is_written_and_loaded() -> None:
    path = "memory://bucketddp/remote/model.ckpt"
    for number in (1, 2):
        BucketDDPCheckpointIO().save_checkpoint({"number": number}, path)
    assert BucketDDPCheckpointIO().load_checkpoint(path) == {"number": 2}


def test_the_longest_name_that_a_file_may_have_is_no_problem(tmp_path: Path) -> None:
    path = str(tmp_path / f"{'x' * 250}.ckpt")
    jobs.save_numbered(1, path)
    assert_only_number_one(path)


def test_a_symbolic_link_is_replaced_and_what_it_pointed_to_is_kept(saved: str, tmp_path: Path) -> None:
    link = tmp_path / "links" / "last.ckpt"
    link.parent.mkdir()
    link.symlink_to(saved)
    jobs.save_numbered(2, str(link))
    assert jobs.number_in(str(link)) == 2
    assert jobs.number_in(saved) == 1


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_the_umask_decides_who_may_read(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        jobs.save_numbered(1, str(tmp_path / "model.ckpt"))
    finally:
        os.umask(before)
    assert (tmp_path / "model.ckpt").stat().st_mode & 0o777 == mode


# --- Complete or absent


def test_the_content_is_on_disk_before_it_gets_its_name(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str, int]] = []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(descriptor: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(("fsync", name, os.fstat(descriptor).st_size))
        fsync(descriptor)

    def recording_replace(old: str, new: str) -> None:
        events.append(("replace", os.path.basename(new), os.stat(old).st_size))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    jobs.save_numbered(2, saved)
    directory, size = os.path.dirname(saved), os.path.getsize(saved)
    assert events == [
        ("fsync", events[0][1], size),
        ("replace", "model.ckpt", size),
        ("fsync", os.path.basename(directory), os.stat(directory).st_size),
    ]


# --- Failed writes


@for_each("limit_bytes", [0, 1_500_000, 4_001_000])
def test_a_full_disk_is_named_and_keeps_the_previous_checkpoint(limit_bytes: int, saved: str) -> None:
    with full_disk(limit_bytes), pytest.raises(CheckpointWriteError) as raised:
        jobs.save_numbered(2, saved)
    assert str(raised.value) == f"Could not write checkpoint `{saved}`: File too large. {ADVICE}"
    assert raised.value.errno == errno.EFBIG
    assert_only_number_one(saved)


def test_a_read_only_disk_is_named_and_keeps_the_previous_checkpoint() -> None:
    with small_disk(num_bytes=10_000_000) as disk:
        path = str(disk.path / "model.ckpt")
        jobs.save_numbered(1, path)
        disk.make_read_only()
        with pytest.raises(CheckpointWriteError, match=f"{path}`: Read-only file system. Check the free") as raised:
            jobs.save_numbered(2, path)
        assert raised.value.errno == errno.EROFS
        assert_only_number_one(path)


@for_each("name", ["model.ckpt", "new/model.ckpt"])
def test_a_missing_permission_is_named(name: str) -> None:
    with forbidden_directory() as directory, not_as_root():
        with pytest.raises(CheckpointWriteError, match=f"{directory}/{name}`: Permission denied. Check") as raised:
            jobs.save_numbered(2, str(directory / name))
        assert raised.value.errno == errno.EACCES
        assert os.listdir(directory) == []


def test_what_is_not_a_file_is_not_replaced(saved: str) -> None:
    directory = os.path.dirname(saved)
    with pytest.raises(CheckpointWriteError, match=f"`{directory}`: something that is not a file has this name"):
        jobs.save_numbered(2, directory)
    assert_only_number_one(saved)


class _InterruptsPickling:
    def __reduce__(self) -> tuple[Any, ...]:
        raise KeyboardInterrupt


def test_content_that_cannot_be_pickled_and_an_interrupt_keep_the_previous_checkpoint(saved: str) -> None:
    with pytest.raises(CheckpointWriteError, match=r"Could not write checkpoint `.*model.ckpt`: .*pickle.*lambda"):
        AtomicCheckpointIO().save_checkpoint({"weights": torch.ones(3), "fn": lambda: 0}, saved)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"weights": torch.ones(3), "ctrl-c": _InterruptsPickling()}, saved)
    assert_only_number_one(saved)


class _DeniedFileSystem(MemoryFileSystem):
    """Remote storage whose credentials do not allow writing."""

    protocol = "denied"

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        raise PermissionError(errno.EACCES, "Access Denied", path)


def test_a_remote_write_that_is_denied_or_of_an_unknown_protocol_names_the_path() -> None:
    fsspec.register_implementation("denied", _DeniedFileSystem, clobber=True)
    with pytest.raises(CheckpointWriteError, match=r"`denied://storage/model.ckpt`: Access Denied") as raised:
        BucketDDPCheckpointIO().save_checkpoint({}, "denied://storage/model.ckpt")
    assert raised.value.errno == errno.EACCES
    with pytest.raises(CheckpointWriteError, match=r"`nosuch://model.ckpt`: ValueError: Protocol not known: nosuch"):
        BucketDDPCheckpointIO().save_checkpoint({}, "nosuch://model.ckpt")


def test_storage_options_are_refused_as_by_lightning(saved: str) -> None:
    with pytest.raises(TypeError, match="`storage_options` arg is not supported for `BucketDDPCheckpointIO`"):
        BucketDDPCheckpointIO().save_checkpoint({}, saved, storage_options={"acl": "public"})
    assert_only_number_one(saved)


@on_ranks()
def test_the_error_of_a_plugin_stays_its_own_on_rank_zero_and_an_interrupt_is_not_turned_into_an_error() -> None:
    def fail() -> None:
        raise ValueError("the storage is on holiday")

    def interrupt() -> None:
        raise KeyboardInterrupt

    collectives = Collectives(device())
    text = "ValueError: the storage is on holiday"
    of_others = f"CheckpointWriteError: Could not write checkpoint `a.ckpt`: {text} (on rank 0)"
    raised = raised_by(lambda: write_on_rank_zero(fail, collectives, path="a.ckpt"))
    assert raised == (of_others if collectives.rank else text)
    if collectives.rank == 0:  # the other ranks take no part: they are not notified
        with pytest.raises(KeyboardInterrupt):
            write_on_rank_zero(interrupt, collectives, path="a.ckpt")


# --- A save that is killed loses itself at most, and the next one removes what it has left

NUM_KILLS = 15
# Until one of them has hit a file that is being written.
MAX_KILLS = 100


@pytest.fixture
def tmpdir_elsewhere(tmp_path: Path) -> Iterator[Path]:
    """An empty directory on another file system than `tmp_path`."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        if os.stat(memory).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("the temporary directory of the tests is in /dev/shm already")
        yield Path(memory)


@pytest.mark.parametrize("in_background", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_killed_save_loses_itself_at_most_and_leaves_nothing_for_long(
    in_background: bool, tmp_path: Path, tmpdir_elsewhere: Path
) -> None:
    directory, tmpdir = tmp_path, tmpdir_elsewhere
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
    for name in (".model.ckpt.17.tmp", ".bucketddp-notes.tmp", f"{temporary_name()}.bak"):
        (tmp_path / name).touch()
    (tmp_path / f".bucketddp-{OURS}-999999999-1-01234567.tmp").mkdir()
    before = set(os.listdir(tmp_path))
    jobs.save_numbered(1, str(tmp_path / "model.ckpt"))
    assert set(os.listdir(tmp_path)) == {*before, "model.ckpt"}
