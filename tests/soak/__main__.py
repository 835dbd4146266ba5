"""Random faults, over all launchers, for a number of rounds or minutes.

Each round starts a small training program on two ranks, has something happen to it, and looks whether all of its
processes end, with the right exit status and words, without a damaged or lost checkpoint, with nothing left behind,
and whether it can be started again and ends with the weights of an undisturbed run.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak.round import Arena, Outcome, run_round, weights_undisturbed
from tests.soak.tally import Tally
from tests.soak.trial import FAULTS, LAUNCHERS, Trial
from tests.support.disks import small_disk

_DISK_BYTES = 2**20


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="at most so many (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10, help="begin no round after so long (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the first round; each next one has the next number")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="only this (may be given again)")
    parser.add_argument("--launcher", choices=LAUNCHERS, action="append", help="only this (may be given again)")
    parser.add_argument("--strategy", choices=("bucketddp", "ddp"), default="bucketddp", help="ddp: for comparison")
    parser.add_argument(
        "--deadline", type=float, default=30, help="seconds that all may take to end (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    until = time.monotonic() + 60 * options.minutes
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {seed}; the files of rounds that go wrong stay in {directory}", flush=True)
    tally = Tally(lambda outcome: _replay(outcome, options))
    arena = Arena(directory=directory, checkpoints=directory, strategy=options.strategy, patience_s=options.deadline)
    weights = ""
    for number in range(seed, seed + options.rounds):
        if time.monotonic() > until:
            break
        weights = weights or _weights_undisturbed(arena)
        trial = Trial.draw(number, launchers=options.launcher or LAUNCHERS, faults=options.fault or FAULTS)
        try:
            with _in(arena, str(number), is_small=trial.fault == "full-disk") as place:
                outcome = run_round(trial, place, expected_weights=weights)
        except pytest.skip.Exception as reason:
            print(f"{number:<11}{trial.describe():<60}left out: {reason}", flush=True)
            continue
        print(tally.add(outcome), flush=True)
        if not outcome.findings:
            shutil.rmtree(directory / str(number))
    print(tally.table(), flush=True)
    if not tally.failed:
        shutil.rmtree(directory)
    return 1 if tally.failed else 0


def _weights_undisturbed(arena: Arena) -> str:
    with _in(arena, "undisturbed") as calm:
        weights = weights_undisturbed(calm)
    shutil.rmtree(arena.directory / "undisturbed")
    return weights


@contextmanager
def _in(arena: Arena, name: str, *, is_small: bool = False) -> Iterator[Arena]:
    """`arena` with a directory of its own, and a disk that can be filled where `is_small`."""
    directory = arena.directory / name
    checkpoints = directory / "checkpoints"
    checkpoints.mkdir(parents=True)
    if not is_small:
        yield replace(arena, directory=directory, checkpoints=checkpoints)
        return
    with small_disk(num_bytes=_DISK_BYTES) as disk:
        yield replace(arena, directory=directory, checkpoints=disk.path, disk=disk)


def _replay(outcome: Outcome, options: argparse.Namespace) -> str:
    only = [f"--fault {fault}" for fault in options.fault or ()]
    only += [f"--launcher {launcher}" for launcher in options.launcher or ()]
    strategy = [] if options.strategy == "bucketddp" else [f"--strategy {options.strategy}"]
    return " ".join(["python -m tests.soak --rounds 1 --seed", str(outcome.trial.seed), *only, *strategy])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
