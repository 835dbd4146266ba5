"""How long a run on two CPU processes takes to begin, and what importing us takes.

    python -m benchmarks.startup [--repetitions 5] [--strategies ddp bucketddp] [--json FILE]

Programs that fit a tiny model (`first_step.py`) take turns. Times are milliseconds from the call of `trainer.fit()` on
rank 0, until the first training step begins and until the first step of the optimizer has ended. Ranks are started in
two ways:

* by Lightning, which runs the script again for rank 1 inside of `fit()`: that process imports everything then. Here
  the whole program is measured, too, from the start of its interpreter to its end;
* both at once with the variables that torchrun sets. They have imported everything and wait for each other before they
  call `fit()`, so this is the rendezvous, process groups, agreement and the Trainer's own set-up, and nothing else.

CPU time is that of both ranks, each from its own call of `fit()`. It depends less on what else the machine does.

Imports are measured in fresh interpreters that take turns. All is run once before it is measured, and our package is
compiled before, as pip does it when it installs a package.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchmarks.command import write
from benchmarks.ports import own_port
from benchmarks.report import Table, about
from benchmarks.turns import take_turns

Name = TypeVar("Name")
Times = dict[str, float]

REPOSITORY = Path(__file__).parent.parent
PROGRAM = [sys.executable, "-m", "benchmarks.first_step"]
BY_LIGHTNING = "Ranks started by Lightning inside of fit(), milliseconds"
TOGETHER = "Ranks started together, as by torchrun, milliseconds"
IMPORTS = "Imports in a fresh interpreter, milliseconds"
NUM_LOOKUPS = 1000

# What an interpreter measures, and the environment that it does so in.
_BARE_TORCH = "import torch, torch's entry points off"
_FINDER = "the autoload finder, after torch"
_LOOKUPS = f"{NUM_LOOKUPS} imports of others that it sees"
_WITH_FINDER = "import torch, as users have it"
_LIGHTNING = "import lightning.pytorch, after torch"
_PACKAGE = "import lightning_bucketddp, after Lightning"
_STRATEGY = "BucketDDPStrategy, after that"
_LOOK_UP = f"for _ in range({NUM_LOOKUPS}): sys.meta_path[0].find_spec('others', None)"
INTERPRETERS: list[tuple[dict[str, str], dict[str, str]]] = [
    (
        {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        {
            _BARE_TORCH: "import torch",
            _FINDER: "import lightning_bucketddp_autoload; lightning_bucketddp_autoload.autoload()",
            _LOOKUPS: _LOOK_UP,
        },
    ),
    ({}, {_WITH_FINDER: "import torch"}),
    (
        {"BUCKETDDP_AUTOLOAD": "0"},
        {
            "": "import torch",
            _LIGHTNING: "import lightning.pytorch",
            _PACKAGE: "import lightning_bucketddp",
            _STRATEGY: "lightning_bucketddp.BucketDDPStrategy",
        },
    ),
]


def start_by_lightning(strategy: str) -> Times:
    """Run a script that starts its second rank itself; return what was measured, by name."""
    with tempfile.TemporaryDirectory() as directory:
        began = time.monotonic()
        subprocess.run(
            [*PROGRAM, strategy],
            cwd=REPOSITORY,
            env={**os.environ, "RESULTS": directory},
            check=True,
            capture_output=True,
        )
        whole = time.monotonic() - began
        return {**_times(Path(directory)), "whole program": 1000 * whole}


def start_together(strategy: str) -> Times:
    """Start both ranks with the variables of torchrun, and let them call `fit()` together."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own_port()), "TORCHELASTIC_RUN_ID": "startup"}
    shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            subprocess.Popen(
                [*PROGRAM, strategy, "--together"],
                cwd=REPOSITORY,
                env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank, "RESULTS": directory},
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in ("0", "1")
        ]
        try:
            for rank in ranks:
                assert rank.stdout is not None
                while rank.stdout.readline() not in ("ready\n", ""):
                    pass
            for rank in ranks:
                assert rank.stdin is not None
                rank.stdin.write("\n")
                rank.stdin.flush()
            for rank in ranks:
                rank.communicate()
                if rank.returncode != 0:
                    raise subprocess.CalledProcessError(rank.returncode, rank.args)
        finally:
            for rank in ranks:
                rank.kill()  # does nothing to one that has ended
        return _times(Path(directory))


def _times(directory: Path) -> Times:
    ranks = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]
    began, _ = ranks[0]["fit"]
    found = {}
    for moment, name in {"begin": "first step begins", "end": "first step has ended"}.items():
        times = [rank[moment][0] - began for rank in ranks]
        found |= {f"{name}, rank 0": times[0], f"{name}, slowest rank": max(times)}
        found[f"{name}, CPU of both"] = sum(rank[moment][1] - rank["fit"][1] for rank in ranks)
    return {name: 1000 * seconds for name, seconds in found.items()}


def import_times(environment: Mapping[str, str], statements: Mapping[str, str]) -> Times:
    """Run `statements` one after the other in a fresh interpreter; return how long each took, by name."""
    lines = ["import json, sys, time", "times = {}"]
    for name, statement in statements.items():
        lines += ["began = time.perf_counter()", statement, f"times[{name!r}] = 1000 * (time.perf_counter() - began)"]
    lines.append("print(json.dumps(times))")
    with tempfile.TemporaryDirectory() as elsewhere:
        ended = subprocess.run(
            [sys.executable, "-c", "\n".join(lines)],
            cwd=elsewhere,
            env={**os.environ, **environment},
            check=True,
            capture_output=True,
            text=True,
        )
    times: Times = json.loads(ended.stdout)
    times.pop("", None)
    return times


def compare(title: str, found: Mapping[str, Sequence[Times]]) -> Table:
    """Return a table of what each strategy has `found` in each round, compared with the first of them."""
    samples = {
        f"{what}: {strategy}": [of_round[what] for of_round in rounds]
        for what in next(iter(found.values()))[0]
        for strategy, rounds in found.items()
    }
    first = next(iter(found))
    medians = {row: statistics.median(values) for row, values in samples.items()}
    rows = {
        row: [medians[row], min(values), max(values), medians[row] / medians[f"{row.rpartition(': ')[0]}: {first}"]]
        for row, values in samples.items()
    }
    return Table(title, ["median", "min", "max", f"x {first}"], rows, samples=samples)


def imports(found: Mapping[int, Sequence[Times]]) -> Table:
    """Return a table of what each interpreter has `found` in each round."""
    samples = {name: [of_round[name] for of_round in rounds] for rounds in found.values() for name in rounds[0]}
    rows = {name: [statistics.median(values), min(values), max(values)] for name, values in samples.items()}
    return Table(IMPORTS, ["median", "min", "max"], rows, samples=samples)


def main(argv: Sequence[str] | None = None) -> list[Table]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--strategies", nargs="+", default=["ddp", "bucketddp"], help="the first is compared with")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers here")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw them here (needs matplotlib)")
    arguments = parser.parse_args(argv)
    compileall.compile_file(REPOSITORY / "lightning_bucketddp_autoload.py", quiet=1)
    for directory in ("lightning_bucketddp", "benchmarks", "tests/support/scripts"):
        compileall.compile_dir(REPOSITORY / directory, quiet=1)
    place = "2 CPU processes"
    print(about(place), f"{arguments.repetitions} rounds\n", sep=", ", flush=True)
    tables = []
    for title, start in ((BY_LIGHTNING, start_by_lightning), (TOGETHER, start_together)):
        turns = {strategy: partial(start, strategy) for strategy in arguments.strategies}
        tables.append(compare(title, _measure(turns, arguments.repetitions)))
        print(tables[-1], flush=True)
    interpreters = {index: partial(import_times, *each) for index, each in enumerate(INTERPRETERS)}
    tables.append(imports(_measure(interpreters, arguments.repetitions)))
    print(tables[-1])
    write(tables, arguments, place=place)
    return tables


def _measure(turns: Mapping[Name, Callable[[], Times]], repetitions: int) -> dict[Name, list[Times]]:
    for turn in turns.values():
        turn()
    return take_turns(turns, repetitions=repetitions)


if __name__ == "__main__":
    main()
