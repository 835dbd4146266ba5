"""A short soak, and that the soak sees what goes wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.soak.__main__ import main
from tests.soak.damage import flip_bit
from tests.soak.round import HANG, LEFTOVER, LOSS, NUM_STEPS, STATUS, WEIGHTS, WORDS, Arena, Outcome, run_round
from tests.soak.tally import Tally
from tests.soak.trial import FAULTS, LAUNCHERS, Trial

# What a program writes that has come to its sixth step on both ranks. From then on it may get signals.
PROGRESS = """
import json, os, pathlib, signal, subprocess, sys, time

def write(name, content):
    path = pathlib.Path(f"{name}.json")
    path.with_suffix(".tmp").write_text(json.dumps(content))
    path.with_suffix(".tmp").replace(path)

HANDLER
for rank in (1, 0):
    write(f"progress{rank}", {"pid": os.getpid(), "step": 6})
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_few_random_faults() -> None:
    # What it prints is shown if it fails, with the seed and the command that repeats the round.
    assert main(["--rounds", "3", "--minutes", "1"]) == 0


def trial(**changes: Any) -> Trial:
    usual = {"seed": 0, "launcher": "script", "fault": "sigterm", "target": 0, "step": 5, "is_restarted": False}
    return Trial(**{**usual, **changes})


def outcome_of(code: str, directory: Path, what: Trial, *, handler: str = "") -> Outcome:
    """What the soak finds about a program that only pretends to train."""
    script, disk = directory / "script.py", directory / "disk"
    script.write_text(PROGRESS.replace("HANDLER", handler) + code)
    disk.mkdir(exist_ok=True)
    arena = Arena(directory=directory, checkpoints=disk, patience_s=1.5, script=script)
    return run_round(what, arena, expected_weights="right")


def kinds(outcome: Outcome) -> set[str]:
    return {finding.kind for finding in outcome.findings}


def test_a_program_that_does_not_end_is_a_hang(tmp_path: Path) -> None:
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    outcome = outcome_of("time.sleep(1000)", tmp_path, trial(), handler=ignoring)
    assert HANG in kinds(outcome)
    pid = json.loads((tmp_path / "progress0.json").read_text())["pid"]
    assert not Path(f"/proc/{pid}").exists()  # it is killed


def test_a_process_that_stays_is_a_leftover(tmp_path: Path) -> None:
    leaving = 'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]); time.sleep(1000)'
    assert LEFTOVER in kinds(outcome_of(leaving, tmp_path, trial()))


def test_a_run_that_ends_early_with_status_zero_is_wrong(tmp_path: Path) -> None:
    pretending = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))"
    assert STATUS in kinds(outcome_of("time.sleep(1000)", tmp_path, trial(), handler=pretending))


@pytest.mark.parametrize(
    ("saved", "fault", "target", "is_lost"),
    [
        (6, "sigterm", 0, False),
        (4, "sigterm", 0, True),
        (4, "kill", 1, True),
        (0, "kill", 0, False),  # at most as many as between two checkpoints
    ],
)
def test_steps_that_are_not_saved_are_a_loss(
    saved: int, fault: str, target: int, is_lost: bool, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    torch.save({"global_step": saved}, tmp_path / "disk" / "last.ckpt")
    told = outcome_of("time.sleep(1000)", tmp_path, trial(fault=fault, target=target))
    assert (LOSS in kinds(told)) == is_lost
    assert WORDS in kinds(told)  # it says nothing of a rank


def test_a_damaged_checkpoint_is_a_loss(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    torch.save({"global_step": 6, "weights": torch.zeros(1000)}, tmp_path / "disk" / "last.ckpt")
    flip_bit(tmp_path / "disk" / "last.ckpt", place=0.5, bit=3)
    assert LOSS in kinds(outcome_of("time.sleep(1000)", tmp_path, trial()))


@pytest.mark.parametrize("weights", ["right", "wrong"])
def test_a_restart_has_to_end_right_and_leave_nothing(weights: str, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    torch.save({"global_step": 6}, tmp_path / "disk" / "last.ckpt")
    code = f"""
print("rank 0 received SIGTERM", flush=True)
if not pathlib.Path("output of restart.txt").exists():
    time.sleep(1000)
for rank in (0, 1):
    write(f"finished{{rank}}", {{"at": time.time(), "step": {NUM_STEPS}, "weights": "{weights}"}})
pathlib.Path("disk/{weights}.tmp").touch()
"""
    outcome = outcome_of(code, tmp_path, trial(is_restarted=True))
    assert kinds(outcome) == ({LEFTOVER} if weights == "right" else {LEFTOVER, WEIGHTS})


def test_seeds_draw_the_same_and_all_there_is() -> None:
    trials = [Trial.draw(seed) for seed in range(400)]
    assert trials == [Trial.draw(seed) for seed in range(400)]
    assert {(one.launcher, one.fault) for one in trials} == {(x, y) for x in LAUNCHERS for y in FAULTS}
    assert {one.target for one in trials} == {0, 1, "all", "launcher", "newest"}


@pytest.mark.parametrize("bounds", [["--rounds", "0"], ["--minutes", "0"]])
def test_both_bounds_hold(bounds: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(bounds) == 0
    assert "rounds                           0" in capsys.readouterr().out


def test_what_went_wrong_is_counted_and_can_be_repeated(tmp_path: Path) -> None:
    tally = Tally(lambda outcome: f"repeat {outcome.trial.seed}")
    well, wrong = Outcome(trial(seed=7)), Outcome(trial(seed=8))
    wrong.find(LOSS, "two steps")
    assert "loss" not in tally.add(well)
    assert "loss: two steps" in tally.add(wrong)
    table = tally.table()
    assert re.search(r"^rounds +2$", table, re.MULTILINE)
    assert re.search(r"^fault sigterm +2$", table, re.MULTILINE)
    assert re.search(r"^wrong: loss +1$", table, re.MULTILINE)
    assert "to see it again: repeat 8" in table
    assert "repeat 7" not in table
