"""One round: a program meets its fault, ends, is looked at, and may be started again."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_bucketddp.checkpoint.integrity import damage_in
from tests.soak.damage import flip_bit
from tests.soak.running import Program, Running, running
from tests.soak.trial import TIMEOUT_S, Trial
from tests.support.disks import Disk
from tests.support.scripts.soaked import NUM_EPOCHS, STEPS_PER_EPOCH

SCRIPT = Path(__file__).parents[1] / "support" / "scripts" / "soaked.py"
NUM_STEPS = NUM_EPOCHS * STEPS_PER_EPOCH
PAUSE_S = 0.03
HANG, LOSS, LEFTOVER, STATUS, WORDS, WEIGHTS = "hang", "loss", "leftover", "exit status", "words", "weights"
WRONGS = (HANG, LOSS, LEFTOVER, STATUS, WORDS, WEIGHTS)


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    kind: str
    what: str


@dataclass
class Outcome:
    """What came of a round."""

    trial: Trial
    findings: list[Finding] = field(default_factory=list)
    came_too_late: bool = False
    seconds: float = 0.0

    def find(self, kind: str, what: str) -> None:
        self.findings.append(Finding(kind, what))


@dataclass(frozen=True, kw_only=True)
class Arena:
    """Where and how rounds are run.

    Attributes:
        directory: of this round; empty.
        checkpoints: where they are.
        disk: that they are on, if it is one of their own.
        strategy: of the Trainer.
        patience_s: how long processes may take to end after a fault.
        script: the program.
    """

    directory: Path
    checkpoints: Path
    disk: Disk | None = None
    strategy: str = "bucketddp"
    patience_s: float = 30.0
    script: Path = SCRIPT

    def program(self, launcher: str, *, fault: dict[str, Any] | None = None) -> Program:
        settings = {
            "directory": str(self.directory),
            "checkpoints": "/mnt" if self.disk else str(self.checkpoints),
            "strategy": self.strategy,
            "timeout_s": TIMEOUT_S,
            "pause_s": PAUSE_S if fault is not None else 0.0,
            "fault": fault or {},
        }
        return Program(self.script, launcher, settings, within=self.disk.within if self.disk else ())


def run_round(trial: Trial, arena: Arena, *, expected_weights: str | None) -> Outcome:
    """What came of `trial`; `expected_weights` are those of a run that nothing happens to."""
    outcome = Outcome(trial)
    fault = {"what": trial.fault, "where": trial.where, "rank": trial.target, "step": trial.step, **trial.details}
    output = arena.directory / "output.txt"
    program = arena.program(trial.launcher, fault=fault)
    with running(program, directory=arena.directory, output=output) as run:
        fault_at = _interfere(trial, run)
        patience_s = arena.patience_s + trial.patience_s
        left = run.wait(fault_at=fault_at, patience_s=patience_s)
        fault_at = fault_at or run.read("fault").get("at")
        if fault_at is None and not left and not _is_finished(run):
            outcome.find(STATUS, f"{run.exit_status}: the program ended by itself, before the fault")
        fault_at = fault_at or time.time()
        outcome.seconds = time.time() - fault_at
        outcome.came_too_late = _is_finished(run) and run.read("finished0")["at"] < fault_at
        if left:
            kind = HANG if run.exit_status is None else LEFTOVER
            outcome.find(kind, f"processes {left} still run {outcome.seconds:.0f} s after the fault; killed")
        else:
            _check_end(outcome, run, output.read_text(), expected_weights)
    if not outcome.came_too_late:
        _check_checkpoints(outcome, arena, run)
        if trial.is_restarted and not outcome.findings:
            _restart(outcome, arena, expected_weights)
    return outcome


def weights_undisturbed(arena: Arena) -> str:
    """Where a run ends that nothing happens to."""
    output = arena.directory / "output.txt"
    with running(arena.program("fork"), directory=arena.directory, output=output) as run:
        left = run.wait(fault_at=None, patience_s=0)
        assert not left, f"the undisturbed run does not end\n{output.read_text()}"
        assert _is_finished(run), output.read_text()
        return str(run.read("finished0")["weights"])


def _interfere(trial: Trial, run: Running) -> float | None:
    """Send the signal of `trial`; when, if there is one."""
    if trial.signal is None:
        return None
    if trial.step is not None and not run.wait_for_step(trial.step):
        return None
    time.sleep(trial.delay_s)
    return run.send(trial.signal, trial.target)


def _is_finished(run: Running) -> bool:
    return all(run.read(f"finished{rank}").get("step") == NUM_STEPS for rank in (0, 1))


def _check_end(outcome: Outcome, run: Running, output: str, expected_weights: str | None) -> None:
    trial = outcome.trial
    if outcome.came_too_late:
        return
    if _is_finished(run) != (run.exit_status == 0):
        outcome.find(STATUS, f"{run.exit_status}, and the run is {'' if _is_finished(run) else 'not '}complete")
    if trial.finishes and not _is_finished(run):
        outcome.find(LOSS, "the run did not go on to its end")
    elif trial.finishes:
        _check_weights(outcome, run, expected_weights)
    elif not trial.is_said_in(output):
        outcome.find(WORDS, f"the output does not say {trial.says!r}")


def _check_weights(outcome: Outcome, run: Running, expected: str | None) -> None:
    for rank in (0, 1):
        if expected is not None and run.read(f"finished{rank}")["weights"] != expected:
            outcome.find(WEIGHTS, f"rank {rank} ends with other weights than an undisturbed run")


def _check_checkpoints(outcome: Outcome, arena: Arena, run: Running) -> None:
    saved = 0
    for path in sorted(arena.checkpoints.glob("*.ckpt")):
        with path.open("rb") as file:
            damage = damage_in(file)
        if damage is not None:
            outcome.find(LOSS, f"{path.name} is damaged: {damage}")
        else:
            saved = max(saved, _step_in(path))
    completed = max(run.read(f"progress{rank}").get("step", 0) for rank in (0, 1))
    if not outcome.trial.finishes and completed - saved > outcome.trial.max_lost_steps:
        outcome.find(LOSS, f"{completed} steps were complete, the newest checkpoint has {saved}")


def _step_in(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["global_step"])


def _restart(outcome: Outcome, arena: Arena, expected_weights: str | None) -> None:
    trial = outcome.trial
    with suppress(FileNotFoundError):
        (arena.checkpoints / "filler").unlink()
    newest = max(arena.checkpoints.glob("*last*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)
    if trial.fault == "flip-file":
        if newest is None:
            outcome.find(LOSS, "there is no checkpoint to be damaged")
            return
        flip_bit(newest, place=trial.details["place"], bit=trial.details["bit"])
    for written_before in arena.directory.glob("*.json"):
        written_before.unlink()
    output = arena.directory / "output of restart.txt"
    with running(arena.program(trial.launcher), directory=arena.directory, output=output) as run:
        if left := run.wait(fault_at=None, patience_s=0):
            outcome.find(HANG, f"processes {left} of the restart still run; killed")
            return
        if trial.fault == "flip-file":
            if run.exit_status == 0 or f"{newest}" not in output.read_text():
                outcome.find(WORDS, f"the restart does not refuse {newest}")
            return
        if run.exit_status != 0 or not _is_finished(run):
            outcome.find(STATUS, f"{run.exit_status} of the restart, which is not complete")
            return
        _check_weights(outcome, run, expected_weights)
    strange = sorted(path.name for path in arena.checkpoints.iterdir() if path.suffix != ".ckpt")
    if strange:
        outcome.find(LEFTOVER, f"files after the next save: {strange}")
