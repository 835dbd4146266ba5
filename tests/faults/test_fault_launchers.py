"""A fault in a real program ends all of its processes, whatever has started them."""

from __future__ import annotations

import re
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_bucketddp import CheckpointWriteError
from lightning_bucketddp.strategies.launchers import Guarded
from tests.soak.round import SCRIPT
from tests.soak.running import Program, running
from tests.soak.trial import Fault
from tests.support import programs, warm
from tests.support.programs import SCRIPTS, run, run_together

# Far from the time-out of the group.
SOON_S = 30
IS_STOPPING = "RankFailedError: Rank {0} is stopping because another rank failed first.\n[rank{0}]: Rank {1} (process "
SETTINGS = {"strategy": "bucketddp", "timeout_s": 600, "pause_s": 0.1, "resume": "last"}


@dataclass(frozen=True)
class Ended:
    """A program that has ended with all its processes."""

    exit_status: int
    output: str
    num_steps: int
    saved_on_exception: Path

    def assert_saved(self) -> None:
        """Of the steps that both ranks have done, one at most is lost."""
        assert self.saved_on_exception.exists(), self.output
        assert self.num_steps - torch.load(self.saved_on_exception, weights_only=True)["global_step"] <= 1


def end_of(launcher: str, directory: Path, *, script: Path = SCRIPT, **fault: Any) -> Ended:
    """Let a program meet a fault inside, or a signal after its seventh step; all of its processes have to end soon."""
    is_inside = fault["what"].startswith("raise")
    settings = {"directory": str(directory), "checkpoints": str(directory / "checkpoints"), **SETTINGS}
    program = Program(script, launcher, {**settings, "faults": [fault] if is_inside else []}, python=warm.python())
    output = directory / "output.txt"
    with running(program, directory=directory, output=output) as run:
        if is_inside:
            assert run.wait_for(lambda: bool(run.read("fault0")), since=run.began_at), output.read_text()
        else:
            assert run.wait_for_step(6, since=run.began_at), output.read_text()
            run.bring(Fault(step=6, **fault))
        soon = time.monotonic() + SOON_S
        left = run.wait(until=lambda: soon)
        assert not left, f"{left} still run\n{output.read_text()}"
        assert run.exit_status, output.read_text()
        steps = [[one["step"] for one in run.reports() if one["rank"] == rank] for rank in (0, 1)]
        num_steps = min(max(of_rank, default=0) for of_rank in steps)
        saved = directory / "checkpoints" / "last-on-exception.ckpt"
        return Ended(run.exit_status, output.read_text(), num_steps, saved)


def test_script_whose_first_process_is_killed(tmp_path: Path) -> None:
    ended = end_of("script", tmp_path, what="kill", target=0)
    assert ended.exit_status == -9
    assert IS_STOPPING.format(1, 0) in ended.output
    assert "killed by signal 9 (SIGKILL)" in ended.output or "only its parent process knows" in ended.output
    # The store was his. The other rank has saved, as the only one that could.
    ended.assert_saved()


@pytest.mark.long
def test_spawned_rank_that_raises_and_checkpoint_of_the_trained_weights(tmp_path: Path) -> None:
    ended = end_of("spawn", tmp_path, what="raise", where="training", rank=1, step=7)
    # torch shows the error of the rank that ends first.
    assert re.search(r"Process 1 terminated with the following error|Rank 1 \(process \d+ on .*\) failed", ended.output)
    assert "ValueError: an accident" in ended.output
    assert "last-on-exception.ckpt` is not saved here, because other processes have trained" in " ".join(
        ended.output.split()
    )
    paths = (ended.saved_on_exception, tmp_path / "checkpoints" / "step=5.ckpt")
    saved, step_5 = (torch.load(path, weights_only=True) for path in paths)
    assert saved["global_step"] == 7
    # Two steps of Adam from there.
    for name, weight in saved["state_dict"].items():
        assert 0 < (weight - step_5["state_dict"][name]).abs().max() < 0.05


@pytest.mark.parametrize("launcher", [pytest.param("spawn", marks=pytest.mark.long), "fork"])
def test_ranks_whose_parent_is_killed_stop_and_save(launcher: str, tmp_path: Path) -> None:
    ended = end_of(launcher, tmp_path, what="kill", target="launcher")
    assert "; all ranks stop." in ended.output
    ended.assert_saved()


@pytest.mark.parametrize("target", ["launcher", pytest.param(1, marks=pytest.mark.long)])
def test_ctrl_c_that_reaches_only_one_process_of_several(target: int | str, tmp_path: Path) -> None:
    ended = end_of("fork", tmp_path, what="sigint", target=target)
    assert "received SIGINT; all ranks stop." in ended.output
    assert ended.exit_status == 1  # Lightning's, for a keyboard interrupt
    ended.assert_saved()


@pytest.mark.long  # tests/strategies/test_max_restarts.py has torchrun start such a rank again
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_with_a_rank_that_is_killed(rank: int, tmp_path: Path) -> None:
    ended = end_of("torchrun", tmp_path, what="kill", target=rank)
    assert "exitcode  : -9" in ended.output
    ended.assert_saved()


def test_callback_that_fails_on_a_rank_whose_end_nobody_shows_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    # Of spawned and forked ranks torch shows how one has ended. The soak fills a disk before another one saves.
    def fail() -> None:
        raise ValueError("an accident")

    def save(_: BaseException) -> None:
        raise CheckpointWriteError("no space left")

    strategy = SimpleNamespace(restarts=None, end_run_by=lambda _: None)
    with pytest.raises(CheckpointWriteError, match="no space left"):
        Guarded(fail, strategy, save, in_child=True)()
    assert "a callback has failed when the run was over: no space left" in caplog.text


@pytest.mark.parametrize(
    ("what", "where"),
    # In a step, rank 0 has caught what that raised: it is in no step any more, and the place in rank 1 is not lost.
    [("raise", r"\w+"), ("raise in a step", "optimizer")],
)
def test_a_fabric_loop_ends_with_a_rank_that_raises(what: str, where: str, tmp_path: Path) -> None:
    ended = end_of("script", tmp_path, what=what, rank=1, step=3, script=SCRIPTS / "fabric_accident.py")
    assert "ValueError: an accident" in ended.output
    assert IS_STOPPING.format(0, 1) in ended.output
    assert re.search(rf"Rank 1 \(process .* failed in {where}.*: ValueError", ended.output), ended.output


# A function that Fabric launches by fork, in which rank 0 is done before rank 1, as on a slow machine, has begun.
IDLE_RANK = """
import time
from lightning.fabric import Fabric
from lightning_bucketddp.faults.side_channel import LocalRanks

def work(fabric):
    if fabric.global_rank == 1:
        print("rank 1 has worked", flush=True)

introduce = LocalRanks.introduce

def introduce_late(ranks, pid):
    time.sleep(ranks._channel.rank)
    introduce(ranks, pid)

LocalRanks.introduce = introduce_late
Fabric(accelerator="cpu", devices=2, strategy="bucketddp_fork").launch(work)
"""


@pytest.mark.long
def test_a_rank_may_begin_when_the_one_with_the_store_has_ended(tmp_path: Path) -> None:
    ended = run("-c", IDLE_RANK, root="lightning.pytorch", directory=tmp_path)
    assert ended.returncode == 0, ended.output
    assert "rank 1 has worked" in ended.output


# A warm interpreter does not let a program change its exit status at its end.
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("popen fit on_fit_end raise", r"Rank 1 \(process \d+\) ended with exit status 1"),
        ("fork fit teardown raise", "ValueError: an accident"),
        ("popen test on_test_end abort", r"Rank 1 \(process \d+\) ended by signal 6"),
    ],
)
@pytest.mark.sampled(2)
def test_a_rank_that_fails_when_rank_zero_is_through(fault: str, expected: str, tmp_path: Path) -> None:
    python = sys.executable if fault.startswith("popen") else None
    program = programs.Program([SCRIPTS / "late_faults.py", *fault.split()], python=python)
    finished = run_together(program, root="lightning.pytorch", directory=tmp_path)
    assert finished.returncode == 1, finished.output
    output = finished.output.partition("nanobind:")[0]  # a library of torch 2.15 tells at the end what it has leaked
    last = [line for line in output.splitlines() if line][-1]
    assert re.search(expected, last), finished.output


CRASH = """
import sys

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel


class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == 1:
            check_label(17)
        return super().training_step(batch, batch_idx)


def check_label(label):
    raise ValueError(f"label {label} is not one of 10 classes")


if __name__ == "__main__":
    L.Trainer(
        accelerator="cpu", devices=2, strategy=sys.argv[1], max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    ).fit(Model())
"""
OF_THE_USER = [
    'File "crash.py", line 11, in training_step',
    "check_label(17)",
    'File "crash.py", line 16, in check_label',
    'raise ValueError(f"label {label} is not one of 10 classes")',
    "ValueError: label 17 is not one of 10 classes",
]


@pytest.mark.parametrize("launcher", ["script", "spawn", "fork", "torchrun"])
@pytest.mark.sampled(2)
def test_a_crash_shows_the_frames_of_the_user_once_and_two_lines_of_another_rank(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text(CRASH)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if launcher == "torchrun" else []
    strategy = f"bucketddp_{launcher}" if launcher in ("spawn", "fork") else "bucketddp"
    ended = run(*torchrun, script, strategy, root="lightning.pytorch", directory=tmp_path)
    assert ended.returncode == 1, ended.output
    # Triton of torch 2.15 lists what it leaks when a process ends, and ends no line.
    said = re.sub(r"nanobind: leaked.*?refleaks\.html", "", ended.output, flags=re.DOTALL)
    lines = said.replace(f"{tmp_path}/", "").splitlines()
    stripped = [re.sub(r"^\[rank1\]:", "", line).strip() for line in lines]
    first = stripped.index(OF_THE_USER[0])
    # torch shows whichever rank it has seen end first; rank 0 names the error before the frames.
    shown = OF_THE_USER[:-1] if "-- Process 0 terminated" in ended.output else OF_THE_USER
    assert stripped[first : first + len(shown)] == shown, ended.output
    assert all(stripped.count(line) == 1 for line in shown), ended.output
    # torchrun ends rank 0 as soon as rank 1 is gone, and torch shows one of the ranks that it has started.
    allowed = {"script": {2}, "torchrun": {0, 2}}.get(launcher, {0})
    assert sum(line.startswith("[rank0]") for line in lines) in allowed, ended.output
    # torchrun shows frames of its own.
    assert not re.search(r'File ".*-packages/(lightning|torch/(?!distributed/)).*", line', ended.output), ended.output
    assert "lightning_bucketddp/" not in ended.output


@pytest.mark.long
def test_a_rank_zero_that_is_killed_leaves_two_lines_and_no_frames_of_its_store(tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    killed = CRASH.replace("check_label(17)", "import os; os.kill(os.getpid(), 9)")
    killed = killed.replace("global_rank == 1", "global_rank == 0")
    script.write_text(killed)
    # Not a warm one, which has read its variables already.
    program = programs.Program([script, "bucketddp"], python=sys.executable)
    ended = run_together(program, root="lightning.pytorch", directory=tmp_path)
    assert ended.returncode == -9, ended.output
    assert IS_STOPPING.format(1, 0) in ended.output
    assert "frame #" not in ended.output
    assert sum(line.startswith("[rank1]") for line in ended.output.splitlines()) == 2, ended.output


def test_an_error_that_was_caught_changes_nothing_for_the_errors_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", before := lambda _, error, __: shown.append(error))

    def fail() -> None:
        torch.nn.Linear(1, 1)(torch.zeros(2))

    for _ in range(2):  # one hook for any number of failures
        with pytest.raises(RuntimeError, match="mat1 and mat2") as failed:
            Guarded(fail, SimpleNamespace(restarts=None, end_run_by=lambda _: None))()
    frames = traceback.extract_tb(failed.value.__traceback__)
    sys.excepthook(RuntimeError, failed.value, failed.value.__traceback__)
    names = [frame.name for frame in traceback.extract_tb(shown[0].__traceback__)]
    # The test and its function, and behind it where torch has raised; not what is between them.
    assert (len(frames) - len(names), names[:2], names[-1]) == (2, [frames[0].name, "fail"], "forward")
    with pytest.raises(ValueError, match="of another library") as another:
        raise ValueError("of another library")
    before_it = another.value.__traceback__
    sys.excepthook(ValueError, another.value, before_it)
    assert shown[1].__traceback__ is before_it
    Guarded(lambda: None, SimpleNamespace(restarts=None, end_run=lambda: None))()
    assert sys.excepthook is before
