"""Programs, command lines and code for tests, run as a user runs them, until no process of theirs is left."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import warm
from tests.support.ranks import run_on_ranks
from tests.support.scripts import one_host
from tests.support.warm import RUN_VARIABLE

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "tests" / "support" / "scripts"
STRATEGY_MODULE_OF = {
    "lightning.pytorch": "lightning_bucketddp.bindings.trainer_lightning",
    "pytorch_lightning": "lightning_bucketddp.bindings.trainer_pytorch_lightning",
}
TIMEOUT_S = 240
# What a process may need to end by itself after the one that it belongs to has ended.
GRACE_S = 10
# Read once: these run in threads, too, and a test that takes back its variables clears all of them for a moment.
_ENVIRONMENT = dict(os.environ)


@dataclass(frozen=True)
class Program:
    """`python <command>`, as the last arguments of `within`; the interpreter is warm, if none is given."""

    command: Sequence[str | Path]
    variables: Mapping[str, str] = field(default_factory=dict)
    within: Sequence[str] = ()
    python: str | None = None

    def start(self, **options: Any) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **options.pop("variables"), **self.variables}
        return subprocess.Popen(
            [*self.within, self.python or warm.python(), *map(str, self.command)], env=environment, **options
        )


@dataclass(frozen=True)
class Run:
    """Programs that have ended, with all their processes."""

    returncode: int
    output: str
    results: dict[str, Any]


def run(*command: str | Path, root: str, directory: Path, cwd: Path | None = None) -> Run:
    """Run `python <command>` and wait until no process of it is left, or fail."""
    return run_together(Program(command), root=root, directory=directory, cwd=cwd)


def run_together(*programs: Program, root: str, directory: Path, cwd: Path | None = None) -> Run:
    """Run all `programs` at once and wait until no process of them is left, or fail."""
    output = directory / "output.txt"  # not a pipe, which a process left behind would keep open
    with no_process_left() as variables:
        variables.update(LIGHTNING_ROOT=root, RESULTS=str(directory))
        with output.open("w") as file:
            options = {"cwd": cwd or directory, "stdout": file, "stderr": subprocess.STDOUT, "variables": variables}
            processes = [program.start(**options) for program in programs]
        wait_for(processes)
        returncode = next((process.returncode for process in processes if process.returncode != 0), 0)
        assert returncode is not None, f"still running; killed\n{output.read_text()}"
    results = {file.stem: json.loads(file.read_text()) for file in directory.glob("*.json")}
    return Run(returncode, output.read_text(), results)


def run_commands(*commands: str, cwd: Path, variables: Mapping[str, str] | None = None) -> str:
    """What `commands`, which run at once, print; fails unless all of them end well."""
    # Where a user who has activated a virtual environment finds `python` and `torchrun`; and srun, which stands in.
    places = [SCRIPTS / "slurm", Path(warm.python()).parent, Path(sys.executable).parent, _ENVIRONMENT["PATH"]]
    path = os.pathsep.join(map(str, places))
    output = cwd / "output.txt"  # not a pipe, which a process left behind would keep open
    with no_process_left() as marks, output.open("w") as file:
        environment = {**_ENVIRONMENT, **(variables or {}), **marks, "PATH": path, "IPYTHONDIR": str(cwd)}
        environment.setdefault("OMP_NUM_THREADS", "1")  # the ranks share few cores
        processes = [
            subprocess.Popen(["bash", "-ec", command], cwd=cwd, env=environment, stdout=file, stderr=subprocess.STDOUT)
            for command in commands
        ]
        wait_for(processes)
        # Here, because at the end of the block what is left of them is killed.
        assert {process.returncode for process in processes} == {0}, output.read_text()
    return output.read_text()


def run_python(*arguments: str, **environment: str) -> str:
    """What `python <arguments>` prints, run outside the repository; fails with its error output if it fails."""
    return _output_of(sys.executable, *arguments, **environment)


def run_code(code: str, **environment: str) -> str:
    """What `code` prints in a fresh interpreter."""
    return run_python("-c", textwrap.dedent(code), **environment).strip()


def run_code_after_torch(code: str, **environment: str) -> str:
    """What `code` prints where torch is imported, and what Lightning imports, but neither Lightning nor we.

    That takes a tenth of the time. With a variable that is read when torch is imported, it is a fresh interpreter.
    """
    return _output_of(warm.python_without_lightning(), "-c", textwrap.dedent(code), **environment).strip()


def _output_of(python: str, *arguments: str, **environment: str) -> str:
    with tempfile.TemporaryDirectory() as elsewhere:
        process = subprocess.run(
            [python, *arguments],
            env={**os.environ, **environment},
            cwd=elsewhere,
            capture_output=True,
            text=True,
            check=False,
        )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@contextmanager
def no_process_left() -> Iterator[dict[str, str]]:
    """Yield variables; a process that still runs with them at the end is killed, and fails the test."""
    run_id = str(uuid.uuid4())
    left_behind = None
    try:
        yield {RUN_VARIABLE: run_id}
        left_behind = _wait_for_end(run_id)
    finally:
        for pid in processes_of(run_id):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert left_behind == []


def processes_of(run_id: str) -> list[int]:
    """The processes that have `run_id` in their environment; torchrun's are in no common session or group."""
    variable = f"{RUN_VARIABLE}={run_id}".encode()
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if variable in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


def _wait_for_end(run_id: str) -> list[int]:
    """The processes that do not end by themselves."""
    deadline = time.monotonic() + 3 * GRACE_S
    while (processes := processes_of(run_id)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return processes


def wait_for(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all have ended; when one fails, not for long, because the others may wait for it for ever."""
    deadline = time.monotonic() + TIMEOUT_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.returncode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.05)


def assert_trained(
    finished: Run,
    *,
    root: str,
    name: str = "run",
    bucket_cap_mb: float | list[float] | str = "auto",
    world_size: int = 2,
    width: int = 2,
) -> list[dict[str, Any]]:
    """Processes have trained together with our strategy, to the weights of other ranks; what each of them wrote."""
    assert finished.returncode == 0, finished.output
    ranks = [finished.results[f"{name}.rank{rank}"] for rank in range(world_size)]
    for rank in ranks:
        assert rank["world_size"] == world_size
        assert rank["steps"] == 16 // world_size
        assert rank["strategy"] == STRATEGY_MODULE_OF[root]
        assert rank["bucket_cap_mb"] == bucket_cap_mb
        assert rank["weights"] == weights_on_one_host(world_size, width)
    assert len({rank["pid"] for rank in ranks}) == world_size
    return ranks


@functools.cache
def weights_on_one_host(world_size: int = 2, width: int = 2) -> dict[str, str]:
    """Where torch DDP trains the module of `fit.py` to; beyond two ranks, where sums are rounded otherwise, we."""
    strategy = "ddp" if world_size == 2 else "bucketddp"
    weights: dict[str, str]
    [weights, *_] = run_on_ranks(one_host.train, world_size=world_size, strategy=strategy, width=width)
    return weights
