"""Runs a program with torch DDP, or the reference, and with us, and tells what differs."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lightning_bucketddp
from tests.fuzz.program import NUM_RANKS, Program
from tests.fuzz.reference import Reference
from tests.fuzz.training import Outcome, train
from tests.support.ranks import RankFailed, close_pools, run_on_ranks

# A program takes less than a second as a rule, but many times as long on a machine that is busy with other things.
TIMEOUT_S = 60.0
# By how much what is computed in another order may differ: steps, norms and sums of gradients that are divided.
TOLERANCE, BF16_TOLERANCE = 1e-6, 1e-3
# What a program is refused with, by the package. Others are mistakes.
REFUSALS = ("RuntimeError", "ValueError")


@dataclass(frozen=True)
class Verdict:
    """What came of a program: `same`, `refused` or `stopped` where all is well; or what is wrong, in a few words."""

    kind: str
    oracle: str
    details: list[str] = field(default_factory=list)

    @property
    def is_failure(self) -> bool:
        return self.kind not in ("same", "refused", "stopped", "no program")

    def __str__(self) -> str:
        return "\n".join([f"{self.kind} (compared with {self.oracle})", *self.details])


@dataclass(frozen=True)
class _Expected:
    """What is right: what each rank has at the end, or may have when a program is ended by an accident."""

    oracle: str
    ranks: list[Outcome]
    at_accident: list[list[dict[str, Any]]]

    @property
    def is_accident(self) -> bool:
        return any(self.at_accident)


def check(program: Program) -> Verdict:
    """Run `program`, and tell what came of it."""
    expected, complaint = _expect(program)
    if complaint is not None:
        return complaint
    assert expected is not None
    ours = train_on_ranks(program, "bucketddp")
    if isinstance(ours, str):
        return Verdict("hangs" if "still running; killed" in ours else "died", expected.oracle, [ours])
    # It may be refused before anything else goes wrong.
    is_refused = not any({"Accident", "Killed"} & set(outcome.kinds) for outcome in ours)
    if expected.is_accident and not is_refused:
        return _judge_accident(ours, expected, tolerance=_tolerance(program))
    if any(outcome.error for outcome in ours):
        return _judge_refusal(ours, expected, tolerance=_tolerance(program))
    differences = compare(ours[0].values, expected.ranks[0].values, tolerance=_tolerance(program))
    differences += [f"rank 1: {line}" for line in _compare_some("weight", ours[1].values, ours[0].values)]
    losses = _compare_some("loss", ours[1].values, expected.ranks[1].values, tolerance=_tolerance(program))
    differences += [f"rank 1: {line}" for line in losses]
    return Verdict("different" if differences else "same", expected.oracle, differences)


def _expect(program: Program) -> tuple[_Expected | None, Verdict | None]:
    """Return what is right, or a verdict on torch DDP or the reference: then nobody knows."""
    expected = None
    if program.reference_can:
        reference = Reference(program)
        try:
            with _one_thread():
                ranks = reference.train()
        except RuntimeError as error:
            return None, Verdict("no program", "reference", [str(error)])
        expected = _Expected("reference", ranks, reference.weights_at_accident)
    if not program.ddp_can:
        return expected, None
    ddp = train_on_ranks(program, "ddp_find_unused_parameters_true" if program.has_unused else "ddp")
    if isinstance(ddp, str) or any(outcome.error for outcome in ddp):
        why = ddp if isinstance(ddp, str) else ddp[0].error or ddp[1].error
        # What torch DDP refuses has no right result, unless the reference knows one.
        return expected, None if expected is not None else Verdict("refused", "ddp", [why])
    if expected is not None and not expected.is_accident:
        differences = compare(ddp[0].values, expected.ranks[0].values)
        if differences:
            return None, Verdict("the reference is not ddp", "reference", differences)
    return _Expected("ddp", ddp, []), None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute as ranks do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _judge_accident(ours: list[Outcome], expected: _Expected, *, tolerance: float) -> Verdict:
    """All ranks must end by an error, and none may have taken a step that is not one of all ranks."""
    findings = [f"rank {rank} ends without an error" for rank, outcome in enumerate(ours) if not outcome.error]
    for rank, (outcome, allowed) in enumerate(zip(ours, expected.at_accident, strict=True)):
        wrong = _unlike_all(outcome, allowed, tolerance=tolerance)
        findings += [f"rank {rank} has taken a step: {line}" for line in wrong]
    errors = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(ours)]
    return Verdict("step after an accident" if findings else "stopped", expected.oracle, [*findings, *errors])


def _judge_refusal(ours: list[Outcome], expected: _Expected, *, tolerance: float) -> Verdict:
    """All ranks must end by an error that is not a mistake of ours, with weights that are right up to then."""
    errors = [f"rank {rank}: {outcome.error or 'no error'}" for rank, outcome in enumerate(ours)]
    if not all(outcome.error for outcome in ours):
        return Verdict("refused on one rank only", expected.oracle, errors)
    own = [outcome for outcome in ours if "RankFailedError" not in outcome.kinds]
    is_ours = any(f"/{lightning_bucketddp.__name__}/" in outcome.raised_in for outcome in own)
    if not is_ours or not all(set(outcome.kinds) & set(REFUSALS) for outcome in ours):
        return Verdict("crashed", expected.oracle, errors)
    allowed = expected.ranks[0].trajectory
    wrong = [
        f"rank {rank} has weights of no step: {line}"
        for rank, outcome in enumerate(ours)
        for line in _unlike_all(outcome, allowed, tolerance=tolerance)
    ]
    return Verdict("refused after a wrong step" if wrong else "refused", expected.oracle, [*wrong, *errors])


def _unlike_all(outcome: Outcome, allowed: list[dict[str, Any]], *, tolerance: float = 0.0) -> list[str]:
    """Return in words how weights differ from the nearest of those that are allowed; nothing if there are some."""
    if outcome.is_partial or not outcome.values:
        return []
    differences = [_compare_some("weight", outcome.values, right, tolerance=tolerance) for right in allowed]
    return min(differences, key=len)


def train_on_ranks(program: Program, strategy: str) -> list[Outcome] | str:
    """Train on two ranks; return in words what has kept them from ending."""
    run_on_ranks(dist.get_rank)  # the first time they take long to start
    is_killed = program.happens("kill")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        try:
            arguments: Any = {"program": program, "strategy": strategy, "directory": Path(directory)}
            outcomes: list[Outcome] = run_on_ranks(train, timeout_s=TIMEOUT_S, grace_s=TIMEOUT_S, **arguments)
        except RankFailed as failure:
            if is_killed and len(failure.values) == 1 and "died with exit code 1" in str(failure):
                killed = Outcome(error="killed", kinds=("Killed",))
                return [failure.values.get(rank, killed) for rank in range(NUM_RANKS)]
            return str(failure)
    if any(outcome.error for outcome in outcomes):
        close_pools()  # their connections may be cut
    return outcomes


def _tolerance(program: Program) -> float:
    if not program.all_options["shard_optimizer"]:
        return 0.0
    adds_to_exchanged = not program.blocks_sync or program.happens("leave_out_step")
    if program.optimizer == "sgd" and program.clip != "norm" and not adds_to_exchanged:
        return 0.0
    return TOLERANCE if program.precision == "32-true" else BF16_TOLERANCE


def compare(ours: dict[str, Any], right: dict[str, Any], *, tolerance: float = 0.0) -> list[str]:
    """Return in words where two sets of values differ; of what Lightning logs the reference knows nothing."""
    alone = [name for name in sorted(ours.keys() ^ right.keys()) if not name.startswith("logged")]
    lines = [f"{name}: only one of them has it" for name in alone]
    for name in [name for name in right if name in ours]:
        largest = _difference(ours[name], right[name])
        if largest > tolerance:
            lines.append(f"{name}: {_short(ours[name])} is not {_short(right[name])}, off by {largest:.3g}")
    return lines


def _compare_some(kind: str, ours: dict[str, Any], right: dict[str, Any], *, tolerance: float = 0.0) -> list[str]:
    """Compare values whose names begin with `kind`."""
    return compare(_only(kind, ours), _only(kind, right), tolerance=tolerance)


def _only(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name.startswith(kind)}


def _difference(a: Any, b: Any) -> float:
    """Return the largest difference between numbers, or lists of them; of what cannot be compared: infinity."""
    if isinstance(a, list) and isinstance(b, list):
        pairs = zip(a, b, strict=True) if len(a) == len(b) else [(0.0, math.inf)]
        return max((_difference(one, other) for one, other in pairs), default=0.0)
    if isinstance(a, int | float) and isinstance(b, int | float):
        if a == b or (math.isnan(a) and math.isnan(b)):
            return 0.0
        return abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf
    return 0.0 if a == b else math.inf


def _short(value: Any) -> str:
    while isinstance(value, list) and value and isinstance(value[0], list):
        value = value[0]
    return f"{value[:3]}..." if isinstance(value, list) and len(value) > 3 else str(value)
