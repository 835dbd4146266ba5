"""How long a program takes that fits a tiny model on two CPU processes, and nothing else: mostly, how long it starts.

    python -m benchmarks.startup [--repetitions 5] [--strategies ddp bucketddp] [--json FILE]

The programs take turns. A time is from the start of the first process to its end, imports included: with a strategy
that runs the script again for rank 1, both processes import everything, one after the other. Each program is run once
before it is measured. Our package is compiled before, as pip does it when it installs a package.
"""

from __future__ import annotations

import argparse
import compileall
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.command import write
from benchmarks.report import Table, about
from benchmarks.turns import take_turns

REPOSITORY = Path(__file__).parent.parent


def seconds_of_program(strategy: str) -> float:
    """Run `tests/support/scripts/fit.py` with `strategy` and return how long it took."""
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "RESULTS": directory}
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "tests.support.scripts.fit", strategy],
            cwd=REPOSITORY,
            env=environment,
            check=True,
            capture_output=True,
        )
        return time.monotonic() - began


def main(argv: Sequence[str] | None = None) -> list[Table]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--strategies", nargs="+", default=["ddp", "bucketddp"], help="the first is compared with")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers here")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw them here (needs matplotlib)")
    arguments = parser.parse_args(argv)
    compileall.compile_dir(REPOSITORY / "lightning_bucketddp", quiet=1)
    turns = {strategy: partial(seconds_of_program, strategy) for strategy in arguments.strategies}
    for turn in turns.values():
        turn()
    samples = take_turns(turns, repetitions=arguments.repetitions)
    medians = {strategy: statistics.median(taken) for strategy, taken in samples.items()}
    first = arguments.strategies[0]
    rows = {strategy: [median, median - medians[first]] for strategy, median in medians.items()}
    title = f"A program that fits a tiny model ({arguments.repetitions} rounds)"
    table = Table(title, ["seconds", f"more than {first}"], rows, samples=samples)
    place = "2 CPU processes"
    print(f"{about(place)}\n\n{table}")
    write([table], arguments, place=place)
    return [table]


if __name__ == "__main__":
    main()
