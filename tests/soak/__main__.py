"""Random faults, over all launchers, for a number of rounds or minutes.

Each round starts a small training program on two ranks, makes faults happen to it, and checks that all of its
processes end, with the right exit status and words, without a damaged or lost checkpoint, with nothing left behind,
and that it can be started again and ends with the weights of an undisturbed run.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import random
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import lightning
import pytest
import torch

from tests.soak.round import Arena, Outcome, run_round, weights_undisturbed
from tests.soak.tally import Tally
from tests.soak.trial import FAULTS, FULL_DISKS, LAUNCHERS, Trial
from tests.support import warm
from tests.support.disks import small_disk
from tests.support.hosts import hosts_on_a_switch

_DISK_BYTES = 2**20
# SLURM's own would have the job killed and queued again; the round does the first of it, and starts it again.
_SCONTROL = "#!/bin/sh\ntouch requeued\n"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="at most so many (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10, help="begin no round after so long (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the first round; each next one has the next number")
    parser.add_argument("--jobs", type=int, default=1, help="rounds side by side (default: %(default)s)")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="only this (may be given again)")
    parser.add_argument("--launcher", choices=LAUNCHERS, action="append", help="only this (may be given again)")
    parser.add_argument("--strategy", choices=("bucketddp", "ddp"), default="bucketddp", help="ddp: for comparison")
    parser.add_argument("--result", type=Path, help="a file for all that was seen, in Markdown")
    parser.add_argument(
        "--deadline", type=float, default=30, help="seconds that all may take to end (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    # Ignored where a shell has started us in the background, and then by all that we start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = parse(arguments)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    until = time.monotonic() + 60 * options.minutes
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    arena = Arena(
        directory=directory,
        checkpoints=directory,
        strategy=options.strategy,
        patience_s=options.deadline,
        resume="auto" if options.strategy == "bucketddp" else "last",
    )
    tally = Tally(lambda outcome: _replay(outcome, options))
    lock = threading.Lock()

    @functools.cache
    def expected_weights() -> str:
        with _in(arena, "undisturbed", None) as calm:
            return weights_undisturbed(calm)

    def run_one(seed: int) -> None:
        if time.monotonic() > until:
            return
        with lock:
            expected_weights()
        trial = Trial.draw(seed, launchers=options.launcher or LAUNCHERS, faults=options.fault or FAULTS)
        try:
            with _in(arena, str(seed), trial) as place:
                outcome = run_round(trial, place, expected_weights=expected_weights())
        except pytest.skip.Exception as reason:
            print(f"{seed:<8}{trial.launcher:<9}left out: {reason}", flush=True)
            return
        with lock:
            print(tally.add(outcome), flush=True)
        if not outcome.findings:
            shutil.rmtree(directory / str(seed))

    print(f"seed {seed}; the files of rounds that go wrong stay in {directory}", flush=True)
    with ThreadPoolExecutor(options.jobs) as jobs:
        list(jobs.map(run_one, range(seed, seed + options.rounds)))
    if not tally.failed:
        shutil.rmtree(directory)
    warm.close()
    print(tally.summary(), flush=True)
    if options.result:
        versions = f"torch {torch.__version__}, Lightning {lightning.__version__}, Python {platform.python_version()}"
        command = shlex.join(["python", "-m", "tests.soak", *arguments])
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        options.result.write_text(tally.document(f"`{command}`, with {versions}, on {machine}."))
    return 1 if tally.failed else 0


@contextmanager
def _in(arena: Arena, name: str, trial: Trial | None) -> Iterator[Arena]:
    """Yield `arena` with a directory of its own, and what `trial` needs: a disk that can be filled, hosts, SLURM."""
    arena = replace(arena, directory=arena.directory / name, checkpoints=arena.directory / name / "checkpoints")
    arena.checkpoints.mkdir(parents=True)
    with ExitStack() as stack:
        if trial and any(fault.what in FULL_DISKS for fault in trial.faults):
            disk = stack.enter_context(small_disk(num_bytes=_DISK_BYTES))
            arena = replace(arena, checkpoints=disk.path, disk=disk)
        if trial and trial.launcher == "hosts":
            arena = replace(arena, network=stack.enter_context(hosts_on_a_switch(2)))
        if trial and trial.launcher == "slurm":
            scontrol = arena.directory / "bin" / "scontrol"
            scontrol.parent.mkdir()
            scontrol.write_text(_SCONTROL)
            scontrol.chmod(0o755)
        yield arena


def _replay(outcome: Outcome, options: argparse.Namespace) -> str:
    only = [f"--fault {fault}" for fault in options.fault or ()]
    only += [f"--launcher {launcher}" for launcher in options.launcher or ()]
    strategy = [] if options.strategy == "bucketddp" else [f"--strategy {options.strategy}"]
    return " ".join(["python -m tests.soak --rounds 1 --seed", str(outcome.trial.seed), *only, *strategy])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
