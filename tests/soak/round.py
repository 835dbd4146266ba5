"""One round: a program meets its faults, ends or goes on, is checked, and may be started again."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_bucketddp.checkpoint.checkpoint_io import damage_in
from tests.soak.running import BEGINS_WITHIN_S, Program, Running, running
from tests.soak.trial import INSIDE, TIMEOUT_S, Fault, Trial
from tests.support import warm
from tests.support.disks import Disk
from tests.support.hosts import Network
from tests.support.scripts.soaked import NUM_EPOCHS, SAMPLES_PER_STEP, STEPS_PER_EPOCH, step_in

SCRIPT = Path(__file__).parents[1] / "support" / "scripts" / "soaked.py"
NUM_STEPS = NUM_EPOCHS * STEPS_PER_EPOCH
HANG, LOSS, RESUME, SAMPLES = "hang", "loss", "not resumed", "samples"
LEFTOVER, STATUS, WORDS, WEIGHTS = "leftover", "exit status", "words", "weights"
# What torch itself leaves when its processes are killed.
_OF_TORCH = re.compile(r"^tmp/(torchelastic_|torchinductor_|pymp-|torch_|pytorch-errorfile-)")
_LEAVES_OUT = re.compile(r"`auto_resume` leaves out checkpoint\s+`.*\.ckpt`")


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    kind: str
    what: str


@dataclass
class Effect:
    """What a fault did."""

    fault: Fault
    seconds: float  # from the fault to the end of all processes or, where the run goes on, to the next complete step
    goes_on: bool = False
    steps_lost: int | None = None  # that had to be done again, or would have to be


@dataclass
class Outcome:
    """What came of a round."""

    trial: Trial
    findings: list[Finding] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)  # of the faults that happened, in their order
    came_too_late: bool = False
    are_replicas_equal: bool | None = None  # None: the run was not complete, and not started again

    def find(self, kind: str, what: str) -> None:
        self.findings.append(Finding(kind, what))


@dataclass(frozen=True, kw_only=True)
class Arena:
    """Where and how rounds are run."""

    directory: Path  # of this round; empty
    checkpoints: Path
    disk: Disk | None = None  # that the checkpoints are on, if it is one of their own
    network: Network | None = None  # whose hosts the ranks are on, if these are their own
    strategy: str = "bucketddp"
    patience_s: float = 30.0  # how long processes may take to end after a fault
    script: Path = SCRIPT
    python: str | None = None  # that runs the script; None: a warm one
    resume: str = "auto"  # or "last": Lightning's `ckpt_path`

    def program(self, trial: Trial | None, *, num_starts: int = 0, hosts: Sequence[int] = (0, 1)) -> Program:
        """Return the program that meets the faults of `trial`; None: that nothing happens to."""
        faults = [] if trial is None else trial.faults
        # That a parent is gone is noticed within seconds, in which a run should not be complete.
        pause_s = 0.0 if trial is None else 0.15 if trial.needs_parents else 0.03
        settings = {
            "directory": str(self.directory),
            "checkpoints": "/mnt" if self.disk else str(self.checkpoints),
            "strategy": self.strategy,
            "timeout_s": trial.timeout_s if trial else TIMEOUT_S,
            "pause_s": pause_s,
            "resume": self.resume,
            "faults": [
                {"what": one.what, "where": one.where, "rank": one.target, "step": one.step, **one.details}
                for one in faults
            ],
        }
        return Program(
            self.script,
            trial.launcher if trial else "fork",
            settings,
            within=self.disk.within if self.disk else (),
            python=self.python or warm.python(),
            network=self.network,
            hosts=hosts,
            num_starts=num_starts,
        )


def run_round(trial: Trial, arena: Arena, *, expected_weights: str | None) -> Outcome:
    """Run `trial`; `expected_weights` are those of a run without faults."""
    outcome = Outcome(trial)
    output = arena.directory / "output.txt"
    with running(arena.program(trial), directory=arena.directory, output=output) as run:
        faults_at = _have_faults(trial, arena, run)
        left = run.wait(until=lambda: _deadline(trial, arena, run, faults_at))
        outcome.came_too_late = not faults_at and _is_finished(run)
        if not faults_at and not left and not outcome.came_too_late:
            outcome.find(STATUS, f"{run.exit_status}: the program ended by itself, before the fault")
        outcome.effects = [_effect(fault, at, run) for fault, at in zip(trial.faults, faults_at, strict=False)]
        if left:
            kind = HANG if run.exit_status is None else LEFTOVER
            seconds = time.monotonic() - max([run.began_at, *faults_at])
            outcome.find(kind, f"processes {left} still run {seconds:.0f} s after the fault; killed")
        elif not outcome.came_too_late:
            _check_end(outcome, arena, run, output.read_text(), expected_weights)
    if outcome.came_too_late:
        return outcome
    _check_checkpoints(outcome, arena)
    if not trial.completes and trial.is_restarted and not outcome.findings:
        _start_again(outcome, arena, expected_weights)
    return outcome


def weights_undisturbed(arena: Arena) -> str:
    """Return the last weights of a run without faults."""
    output = arena.directory / "output.txt"
    with running(arena.program(None), directory=arena.directory, output=output) as run:
        left = run.wait(until=lambda: run.began_at + BEGINS_WITHIN_S)
        assert not left, f"the undisturbed run does not end\n{output.read_text()}"
        assert _is_finished(run), output.read_text()
        return str(run.read("finished0")["weights"])


def _have_faults(trial: Trial, arena: Arena, run: Running) -> list[float]:
    """Make the faults of `trial` happen, or wait for those that come from inside; return when each of them was."""
    faults_at: list[float] = []
    for number, fault in enumerate(trial.faults):
        since = max([run.began_at, *faults_at])
        name = f"fault{number}"
        if fault.what in INSIDE:
            if not run.wait_for(lambda name=name: bool(run.read(name)), since=since):  # type: ignore[misc]
                break
        else:
            if fault.step is not None and not run.wait_for_step(fault.step, since=since):
                break
            time.sleep(fault.delay_s)
            if run.exit_status is not None or _is_finished(run):
                break
            at = run.bring(fault)
            (arena.directory / f"{name}.json").write_text(json.dumps({"at": at}))
        faults_at.append(run.read(name)["at"])
        if fault.what == "requeue" and run.wait_for((arena.directory / "requeued").exists, since=faults_at[-1]):
            # As SLURM does with the job.
            run.bring(replace(fault, what="kill", target="all"))
    return faults_at


def _deadline(trial: Trial, arena: Arena, run: Running, faults_at: list[float]) -> float:
    """Return when all processes must have ended: soon after a fault, or after the last step of a run that goes on."""
    patience_s = arena.patience_s + max(fault.patience_s for fault in trial.faults)
    if _is_finished(run):
        return max([*faults_at, *(float(run.read(f"finished{rank}").get("at", 0)) for rank in (0, 1))]) + patience_s
    if trial.completes or not faults_at:
        moved_at = max([run.began_at, *faults_at, *(one["at"] for one in run.reports())])
        return moved_at + patience_s + BEGINS_WITHIN_S
    return faults_at[-1] + patience_s


def _is_finished(run: Running) -> bool:
    ranks = range(run.read("finished0").get("world_size", 1))
    return all(run.read(f"finished{rank}").get("step") == NUM_STEPS for rank in ranks)


def _effect(fault: Fault, at: float, run: Running) -> Effect:
    reports = run.reports()
    if fault.goes_on:
        done = max((one["step"] for one in reports if one["at"] <= at), default=0)
        next_at = next((one["at"] for one in reports if one["at"] > at and one["step"] > done), time.monotonic())
        return Effect(fault, next_at - at, goes_on=True, steps_lost=0)
    attempt = max((one["attempt"] for one in reports if one["attempt"] <= at), default=0)
    done = max((one["step"] for one in reports if one["attempt"] == attempt), default=0)
    later = [one for one in reports if one["attempt"] > at]
    if not later:
        return Effect(fault, time.monotonic() - at)
    begun = later[0]["step"]
    next_at = next((one["at"] for one in later if one["step"] > begun), time.monotonic())
    return Effect(fault, next_at - at, goes_on=True, steps_lost=max(done - begun, 0))


def _check_end(outcome: Outcome, arena: Arena, run: Running, output: str, expected_weights: str | None) -> None:
    trial = outcome.trial
    is_launcher_killed = any(one.signal == "SIGKILL" and one.ends_launcher for one in trial.faults)
    if _is_finished(run) != (run.exit_status == 0) and not (is_launcher_killed and run.exit_status == -9):
        outcome.find(STATUS, f"{run.exit_status}, and the run is {'' if _is_finished(run) else 'not '}complete")
    if trial.completes and not _is_finished(run):
        outcome.find(LOSS, "the run did not go on to its end")
    elif _is_finished(run):
        _check_finish(outcome, arena, run, expected_weights)
    for words in trial.not_said_in(output):
        outcome.find(WORDS, f"the output does not say {words!r}")
    for effect in outcome.effects:
        if effect.steps_lost is not None and effect.steps_lost > effect.fault.max_lost_steps:
            kind = RESUME if effect.goes_on else LOSS
            outcome.find(kind, f"{effect.steps_lost} steps were done again after {effect.fault.what}")


def _check_finish(outcome: Outcome, arena: Arena, run: Running, expected: str | None) -> None:
    """Check a run that is complete: equal and right weights, each sample once in an epoch, nothing left."""
    num_ranks = run.read("finished0")["world_size"]
    weights = [run.read(f"finished{rank}")["weights"] for rank in range(num_ranks)]
    outcome.are_replicas_equal = len(set(weights)) == 1
    if not outcome.are_replicas_equal:
        outcome.find(WEIGHTS, "the ranks end with other weights than each other")
    elif outcome.trial.keeps_ranks and expected is not None and weights[0] != expected:
        outcome.find(WEIGHTS, "the ranks end with other weights than in an undisturbed run")
    if arena.resume == "auto":
        _check_samples(outcome, arena)
        output = "".join(path.read_text() for path in arena.directory.glob("output*.txt"))
        if any(one.what == "flip-file" for one in outcome.trial.faults) and not _LEAVES_OUT.search(output):
            outcome.find(WORDS, "the output does not say which checkpoint is damaged")
    strange = [path.name for path in arena.checkpoints.iterdir() if path.suffix != ".ckpt"]
    # Lightning leaves an empty directory there where it spawns ranks.
    temporary = [path for path in (arena.directory / "tmp").rglob("*") if path.is_file()]
    strange += [path.name for path in temporary if not _OF_TORCH.search(str(path.relative_to(arena.directory)))]
    # Names of shared memory have the process that made it in them.
    strange += [
        path.name for path in Path("/dev/shm").iterdir() if any(f"_{pid}_" in f"{path.name}_" for pid in run.pids)
    ]
    if strange:
        outcome.find(LEFTOVER, f"files: {sorted(strange)}")


def _check_samples(outcome: Outcome, arena: Arena) -> None:
    """Check that each sample of an epoch is in one step, of the steps as they were done last."""
    seen_in: dict[int, tuple[float, list[int]]] = {}
    for path in arena.directory.glob("seen*.jsonl"):
        for seen in map(json.loads, path.read_text().splitlines()):
            attempt, samples = seen_in.get(seen["step"], (0.0, []))
            if seen["attempt"] >= attempt:
                others = samples if seen["attempt"] == attempt else []
                seen_in[seen["step"]] = (seen["attempt"], [*others, *seen["samples"]])
    for epoch in range(NUM_EPOCHS):
        of_epoch = range(1 + epoch * STEPS_PER_EPOCH, 1 + (epoch + 1) * STEPS_PER_EPOCH)
        count = Counter(sample for step in of_epoch for sample in seen_in.get(step, (0.0, []))[1])
        wrong = {sample: count[sample] for sample in range(SAMPLES_PER_STEP * STEPS_PER_EPOCH) if count[sample] != 1}
        if wrong:
            outcome.find(SAMPLES, f"epoch {epoch} has these samples not once but so often: {wrong}")


def _check_checkpoints(outcome: Outcome, arena: Arena) -> None:
    """Check that all files are intact, and, where the run has ended, how far the newest is behind."""
    flipped = any(arena.directory.glob("flipped*"))
    saved = 0
    # Lightning saves beside them before it has a job requeued.
    for path in sorted([*arena.checkpoints.glob("*.ckpt"), *arena.directory.glob("*.ckpt")]):
        with path.open("rb") as file:
            damage = damage_in(file)
        if damage is None:
            saved = max(saved, step_in(path))
        elif not flipped:
            outcome.find(LOSS, f"{path.name} is damaged: {damage}")
    for effect in outcome.effects[-1:]:
        if effect.steps_lost is None:
            done = _last_step(arena)
            effect.steps_lost = max(done - saved, 0)
            if effect.steps_lost > effect.fault.max_lost_steps:
                outcome.find(LOSS, f"{done} steps were complete, the newest checkpoint has {saved}")


def _last_step(arena: Arena) -> int:
    """Return the last step of the last start."""
    lines = [line for path in arena.directory.glob("rank*.jsonl") for line in path.read_text().splitlines()]
    return max(((one["attempt"], int(one["step"])) for one in map(json.loads, lines)), default=(0, 0))[1]


def _start_again(outcome: Outcome, arena: Arena, expected_weights: str | None) -> None:
    """Start the program a second time, as an operator or SLURM does: it has to come to its end."""
    fault, done = outcome.trial.faults[-1], _last_step(arena)
    hosts = (1,) if fault.what == "lost-host" else (0, 1)
    output = arena.directory / "output of second start.txt"
    program = arena.program(outcome.trial, num_starts=1, hosts=hosts)
    with running(program, directory=arena.directory, output=output) as run:
        if left := run.wait(until=lambda: run.began_at + BEGINS_WITHIN_S):
            outcome.find(HANG, f"processes {left} of the second start still run; killed")
        elif run.exit_status != 0 or not _is_finished(run):
            outcome.find(STATUS, f"{run.exit_status} of the second start, which is not complete")
        else:
            # None where the first start has come to its end all the same.
            begun = next((int(one["step"]) for one in run.reports()), done)
            if done - begun > fault.max_lost_steps:
                outcome.find(RESUME, f"{done} steps were complete, the second start begins after {begun}")
            _check_finish(outcome, arena, run, expected_weights)
