"""Random faults, over all launchers, for a number of rounds or minutes.

Each round starts a small training program on two ranks, has something happen to it, and looks whether all of its
processes end, with the right exit status and words, without a damaged or lost checkpoint, with nothing left behind,
and whether it can be started again and ends with the weights of an undisturbed run.
"""

from __future__ import annotations

import argparse
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


class Soak:
    """All rounds of one call, and what they have come to."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._until = time.monotonic() + 60 * options.minutes
        self._directory = Path(tempfile.mkdtemp(prefix="soak-"))
        self._arena = Arena(
            directory=self._directory,
            checkpoints=self._directory,
            strategy=options.strategy,
            patience_s=options.deadline,
            resume="auto" if options.strategy == "bucketddp" else "last",
        )
        self._weights = ""
        self._lock = threading.Lock()
        self.tally = Tally(lambda outcome: _replay(outcome, options))

    def run(self, seed: int) -> None:
        print(f"seed {seed}; the files of rounds that go wrong stay in {self._directory}", flush=True)
        with ThreadPoolExecutor(self._options.jobs) as jobs:
            list(jobs.map(self._run_round, range(seed, seed + self._options.rounds)))
        if not self.tally.failed:
            shutil.rmtree(self._directory)

    def _run_round(self, seed: int) -> None:
        if time.monotonic() > self._until:
            return
        with self._lock:
            self._weights = self._weights or self._weights_undisturbed()
        options = self._options
        trial = Trial.draw(seed, launchers=options.launcher or LAUNCHERS, faults=options.fault or FAULTS)
        try:
            with _in(self._arena, str(seed), trial) as place:
                outcome = run_round(trial, place, expected_weights=self._weights)
        except pytest.skip.Exception as reason:
            print(f"{seed:<8}{trial.launcher:<9}left out: {reason}", flush=True)
            return
        with self._lock:
            print(self.tally.add(outcome), flush=True)
        if not outcome.findings:
            shutil.rmtree(self._directory / str(seed))

    def _weights_undisturbed(self) -> str:
        with _in(self._arena, "undisturbed", None) as calm:
            weights = weights_undisturbed(calm)
        shutil.rmtree(self._directory / "undisturbed")
        return weights


def main(arguments: list[str]) -> int:
    # Ignored where a shell has started us in the background, and then by all that we start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = parse(arguments)
    soak = Soak(options)
    soak.run(random.randrange(10**6) if options.seed is None else options.seed)
    warm.close()
    print(soak.tally.table(), flush=True)
    if options.result:
        versions = f"torch {torch.__version__}, Lightning {lightning.__version__}, Python {platform.python_version()}"
        command = shlex.join(["python", "-m", "tests.soak", *arguments])
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        options.result.write_text(soak.tally.document(f"`{command}`, with {versions}, on {machine}."))
    return 1 if soak.tally.failed else 0


@contextmanager
def _in(arena: Arena, name: str, trial: Trial | None) -> Iterator[Arena]:
    """`arena` with a directory of its own, and what `trial` needs: a disk that can be filled, hosts, SLURM."""
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
