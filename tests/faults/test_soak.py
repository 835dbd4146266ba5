"""A short soak, and that the soak finds what goes wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.soak.__main__ import main
from tests.soak.round import (
    HANG,
    LEFTOVER,
    LOSS,
    NUM_STEPS,
    RESUME,
    SAMPLES,
    STATUS,
    WEIGHTS,
    WORDS,
    Arena,
    Outcome,
    run_round,
)
from tests.soak.trial import FAULTS_OF, LAUNCHERS, Fault, Trial
from tests.support.scripts.soaked import SAMPLES_PER_STEP, STEPS_PER_EPOCH

# What a program writes that has come to its sixth step on both ranks. From then on it may get signals.
PROGRESS = """
import json, os, pathlib, signal, subprocess, sys, time

def write(name, content):
    path = pathlib.Path(f"{name}.json")
    path.with_suffix(".tmp").write_text(json.dumps(content))
    path.with_suffix(".tmp").replace(path)

def append(name, content):
    with open(f"{name}.jsonl", "a") as file:
        file.write(json.dumps(content) + "\\n")

def train(*steps, samples=lambda step: []):
    attempt = time.monotonic()
    for step in steps:
        for rank in (1, 0):
            append(f"seen{rank}", {"attempt": attempt, "step": step, "samples": samples(step)[rank::2]})
            append(f"rank{rank}", {"attempt": attempt, "step": step, "at": time.monotonic(), "pid": os.getpid()})

def finish(weights):
    for rank in (0, 1):
        end = {"at": time.monotonic(), "step": NUM_STEPS, "weights": weights, "world_size": 2}
        write(f"finished{rank}", end)

HANDLER
if not pathlib.Path("rank0.jsonl").exists():
    train(6)
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_few_random_faults() -> None:
    # What it prints is shown if it fails, with the seed and the command that repeats the round.
    assert main(["--rounds", "4", "--minutes", "1", "--jobs", "2"]) == 0


def trial(*, launcher: str = "script", is_restarted: bool = False, seed: int = 0, **changes: Any) -> Trial:
    fault = Fault(**{"what": "sigterm", "target": 0, "step": 5, **changes})
    return Trial(seed=seed, launcher=launcher, faults=(fault,), is_restarted=is_restarted)


def outcome_of(code: str, directory: Path, what: Trial, *, handler: str = "", resume: str = "last") -> Outcome:
    """What the soak finds about a program that only pretends to train."""
    script, disk = directory / "script.py", directory / "disk"
    begin = PROGRESS.replace("HANDLER", handler).replace("NUM_STEPS", str(NUM_STEPS))
    script.write_text(begin + code)
    disk.mkdir(exist_ok=True)
    arena = Arena(
        directory=directory, checkpoints=disk, patience_s=1.5, script=script, python=sys.executable, resume=resume
    )
    return run_round(what, arena, expected_weights="right")


def kinds(outcome: Outcome) -> set[str]:
    return {finding.kind for finding in outcome.findings}


@pytest.mark.parametrize(
    ("handler", "code", "found"),
    [
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "time.sleep(1000)", HANG),
        # Before the progress is written: SIGTERM may come right behind that.
        ('subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])', "time.sleep(1000)", LEFTOVER),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))", "time.sleep(1000)", STATUS),
    ],
    ids=["it does not end", "a process stays", "it ends early with status zero"],
)
def test_a_program_that_does_not_end_well_is_found(handler: str, code: str, found: str, tmp_path: Path) -> None:
    assert found in kinds(outcome_of(code, tmp_path, trial(), handler=handler))
    pid = json.loads((tmp_path / "rank0.jsonl").read_text())["pid"]
    assert not Path(f"/proc/{pid}").exists()  # it is killed


@pytest.mark.parametrize(
    ("saved", "fault", "target", "is_lost"),
    [
        (6, "sigterm", 0, False),
        (4, "sigterm", 0, True),
        (4, "kill", 0, True),  # the other rank saves
        (0, "kill", "all", False),  # at most as many as between two checkpoints
    ],
)
def test_steps_that_are_not_saved_are_a_loss(
    saved: int, fault: str, target: int | str, is_lost: bool, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    torch.save({"global_step": saved}, tmp_path / "disk" / "last.ckpt")
    outcome = outcome_of("time.sleep(1000)", tmp_path, trial(what=fault, target=target))
    assert (LOSS in kinds(outcome)) == is_lost
    assert (WORDS in kinds(outcome)) == isinstance(target, int)  # it says nothing of a rank


@pytest.mark.parametrize(
    ("begins", "weights", "found"),
    [(6, "right", {LEFTOVER}), (6, "wrong", {LEFTOVER, WEIGHTS}), (0, "right", {LEFTOVER, RESUME})],
)
def test_a_second_start_has_to_resume_end_right_and_leave_nothing(
    begins: int, weights: str, found: set[str], tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    torch.save({"global_step": 6}, tmp_path / "disk" / "last.ckpt")
    code = f"""
print("rank 0 received SIGTERM", flush=True)
if not pathlib.Path("output of second start.txt").exists():
    time.sleep(1000)
train(*range({begins}, {NUM_STEPS} + 1))
finish("{weights}")
pathlib.Path("disk/{weights}.tmp").touch()
"""
    assert kinds(outcome_of(code, tmp_path, trial(is_restarted=True))) == found


@pytest.mark.parametrize(("shift", "found"), [(0, set()), (1, {SAMPLES})])
def test_a_sample_that_is_seen_twice_is_found(shift: int, found: set[str], tmp_path: Path) -> None:
    # The program does not end by its fault, as with torchrun, and goes on with the samples from the sixth step on.
    code = f"""
def samples(step):
    first = {SAMPLES_PER_STEP} * ((step - 1) % {STEPS_PER_EPOCH})
    return [max(first - {shift}, 0), first + 1]
write("fault0", {{"at": time.monotonic()}})
train(*range(1, {NUM_STEPS} + 1), samples=samples)
finish("right")
"""
    assert kinds(outcome_of(code, tmp_path, trial(what="slow", where="training"), resume="auto")) == found


def test_seeds_draw_the_same_and_all_there_is() -> None:
    trials = [Trial.draw(seed) for seed in range(1200)]
    assert trials == [Trial.draw(seed) for seed in range(1200)]
    drawn = {(one.launcher, fault.what) for one in trials for fault in one.faults}
    assert drawn == {(launcher, fault) for launcher in LAUNCHERS for fault in FAULTS_OF[launcher]}
    assert {fault.target for one in trials for fault in one.faults} == {0, 1, "all", "ranks", "launcher", "newest"}
