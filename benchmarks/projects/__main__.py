"""Train models of packages from PyPI with `ddp` and with `bucketddp`, and compare the results bit by bit.

    python -m benchmarks.projects [--only PACKAGE] [--result FILE]

Each is trained for some steps on two CPU processes, with the same seed. Weights, buffers and optimizer state of both
ranks of `bucketddp` must be those of rank 0 with `ddp`. A third training is the control: there gradients travel as
bf16, and the comparison must notice. The packages are installed into `.venv-projects`, the first time.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.projects.catalog import PROJECTS, Project
from benchmarks.projects.comparison import NUM_RANKS, Difference, Training, difference, reference

REPOSITORY = Path(__file__).parent.parent.parent
ENVIRONMENT = REPOSITORY / ".venv-projects"
PYTHON = ENVIRONMENT / "bin" / "python"
REQUIREMENTS = [Path(__file__).parent / name for name in ("requirements.txt", "constraints.txt")]
CONTROL = "bucketddp_bf16"
_PATIENCE_S = 900
_VERSIONS = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"


class TrainingFailedError(Exception):
    """A training did not end as it should."""


@dataclass(frozen=True)
class Outcome:
    """What the trainings of one project have come to."""

    num_steps: int
    num_tensors: int
    difference: Difference
    control: Difference
    notes: Sequence[str]

    @property
    def is_good(self) -> bool:
        """Return True if nothing differs but the control."""
        return not self.difference.num_different and self.control.num_different > 0


def install() -> None:
    """Make the environment, unless it is there with these requirements."""
    wanted = "".join(path.read_text() for path in REQUIREMENTS)
    stamp = ENVIRONMENT / "installed.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"Installing the packages into {ENVIRONMENT}; this is done once, and may take minutes", flush=True)
    subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
    requirements, constraints = REQUIREMENTS
    pip = [PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", requirements, "-c", constraints, "-e", REPOSITORY], check=True)
    stamp.write_text(wanted)


def versions(*packages: str) -> list[str]:
    """Return the installed versions of `packages`."""
    command = [PYTHON, "-c", _VERSIONS, *packages]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def train(project: Project, folder: Path, *strategies: str) -> list[Training]:
    """Train in processes of their own; raise TrainingFailedError with the name of their log."""
    folder.mkdir()
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [PYTHON, "-m", "benchmarks.projects.training", project.module, folder, *strategies]
    began, log = time.monotonic(), folder / "log.txt"
    print(f"{project.package}: training with {', '.join(strategies)} ...", end=" ", flush=True)
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            exit_code = process.wait(_PATIENCE_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    if exit_code != 0:
        raise TrainingFailedError(f"ended with exit status {exit_code}; see {log}")
    trainings = [Training.load(folder / strategy) for strategy in strategies]
    for strategy, training in zip(strategies, trainings, strict=True):
        if training.in_torch_ddp != strategy.startswith("ddp"):
            raise TrainingFailedError(f"`{strategy}` was not what trained; see {log}")
    return trainings


def compare(project: Project, folder: Path) -> Outcome:
    """Train `project` with all strategies."""
    theirs, ours, control = train(project, folder, project.ddp, "bucketddp", CONTROL)
    expected = reference(theirs)
    notes = [f"needs `{project.ddp}`, or raises"] * (project.ddp != "ddp")
    if names := difference(expected, theirs).names:
        kinds = " and ".join(f"`{kind}`" for kind in sorted({name.rpartition(".")[2] for name in names}))
        notes.append(f"with `ddp`, rank 1 ends with other {kinds} than rank 0")
    found = difference(expected, ours)
    if found.num_different:
        [again] = train(project, folder / "again", project.ddp)
        notes.append(f"`ddp` against itself: {difference(expected, reference(again))}")
    return Outcome(ours.num_steps, len(ours.tensors[0]), found, difference(expected, control), notes)


def row(project: Project, version: str, outcome: Outcome | Exception) -> str:
    """Return the line of the table for `project`."""
    cells = [project.package, version, project.trained, project.through]
    if isinstance(outcome, Outcome):
        numbers = [str(outcome.num_steps), str(outcome.num_tensors)]
        cells += [*numbers, str(outcome.difference), f"{outcome.control.largest:.0e}", "; ".join(outcome.notes)]
    else:
        cells += ["", "", "failed", "", str(outcome)]
    return f"| {' | '.join(cells)} |"


HEADER = """\
| package | version | trained | through | steps | tensors | `bucketddp` against `ddp` | with bf16 (control) | notes |
|---|---|---|---|---|---|---|---|---|"""


def result(table: str, arguments: Sequence[str], *, num_equal: int, num_projects: int) -> str:
    """Return the text of a result file."""
    torch, lightning = versions("torch", "lightning")
    command = shlex.join(["python", "-m", "benchmarks.projects", *arguments])
    return f"""\
# Third-party projects, two CPU processes, {time.strftime("%B %Y")}

`bucketddp` gave the weights, buffers and optimizer state of `ddp` bit by bit in {num_equal} of {num_projects} projects. In the control
gradients travelled as bf16; that column is the largest difference that it made.

    {command}

torch {torch}, Lightning {lightning}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, {NUM_RANKS} CPU processes

{table}
"""  # noqa: E501


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.projects",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [project.package for project in PROJECTS]
    parser.add_argument("--only", choices=names, action="append", help="train only this (may be given again)")
    parser.add_argument("--result", type=Path, metavar="FILE", help="also write the table here, in Markdown")
    options = parser.parse_args(arguments)
    chosen = [project for project in PROJECTS if project.package in (options.only or names)]
    install()
    folder = Path(tempfile.mkdtemp(prefix="projects-"))
    lines, num_equal = [], 0
    for project, version in zip(chosen, versions(*(project.package for project in chosen)), strict=True):
        outcome: Outcome | Exception
        try:
            outcome = compare(project, folder / project.module)
            num_equal += outcome.is_good
        except (TrainingFailedError, subprocess.TimeoutExpired, OSError, ValueError) as error:
            outcome = error
        lines.append(row(project, version, outcome))
        print(lines[-1], flush=True)
    table = "\n".join([HEADER, *lines])
    print(f"\n{table}\n\n{num_equal} of {len(chosen)} are equal bit by bit", flush=True)
    if options.result is not None:
        options.result.write_text(result(table, arguments, num_equal=num_equal, num_projects=len(chosen)))
    if num_equal == len(chosen):
        shutil.rmtree(folder)
    return int(num_equal < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
