"""A training program that runs, with all its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.programs import processes_of
from tests.support.warm import RUN_VARIABLE

# Starting takes seconds, and minutes where the machine has other things to do.
_BEGINS_WITHIN_S = 180.0
_LOOK_EVERY_S = 0.01
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Program:
    """A script that is started by a launcher in a `python`, as the last arguments of `within`."""

    script: Path
    launcher: str
    settings: dict[str, Any]
    within: Sequence[str] = ()
    python: str = sys.executable

    @property
    def command(self) -> Sequence[str]:
        start_method = self.launcher if self.launcher in ("spawn", "fork") else "popen"
        settings = json.dumps({**self.settings, "start_method": start_method})
        by_torchrun = _TORCHRUN if self.launcher == "torchrun" else ()
        return (*self.within, self.python, *by_torchrun, str(self.script), settings)


class Running:
    """The processes of one program."""

    def __init__(self, process: subprocess.Popen[bytes], run_id: str, directory: Path) -> None:
        self._process = process
        self._run_id = run_id
        self._directory = directory
        self._began_at = time.time()

    @property
    def exit_status(self) -> int | None:
        """Of the program that was started; None: it has not ended."""
        return self._process.poll()

    @property
    def processes(self) -> list[int]:
        return processes_of(self._run_id)

    def read(self, name: str) -> dict[str, Any]:
        """What the program has written under `name`, so far."""
        with suppress(FileNotFoundError):
            return dict(json.loads((self._directory / f"{name}.json").read_text()))
        return {}

    def wait_for_step(self, step: int) -> bool:
        """Whether rank 0 comes to `step`; not if the program ends before, or does not begin."""
        deadline = self._began_at + _BEGINS_WITHIN_S
        while self.read("progress0").get("step", 0) <= step:
            if self.exit_status is not None or time.time() > deadline:
                return False
            time.sleep(_LOOK_EVERY_S)
        return True

    def send(self, name: str, target: int | str) -> float:
        """Signal `name` to processes of this program, and to no other; when."""
        for pid in self._pids_of(target):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.Signals[name])
        return time.time()

    def _pids_of(self, target: int | str) -> list[int]:
        if target == "launcher":
            return [self._process.pid] if self.exit_status is None else []
        if target in ("all", "newest"):
            pids = sorted(self.processes, key=_start_time)
            return pids if target == "all" else pids[-1:]
        pid = self.read(f"progress{target}").get("pid")
        return [pid] if pid in self.processes else []

    def wait(self, *, fault_at: float | None, patience_s: float) -> list[int]:
        """Wait until all processes have ended; those that have not in `patience_s` after the fault."""
        while processes := self.processes:
            fault_at = fault_at or self.read("fault").get("at")
            deadline = self._began_at + _BEGINS_WITHIN_S if fault_at is None else fault_at + patience_s
            if time.time() > deadline:
                return processes
            self._process.poll()
            time.sleep(0.05)
        self._process.wait()
        return []


@contextmanager
def running(program: Program, *, directory: Path, output: Path) -> Iterator[Running]:
    """Start `program`; none of its processes is left at the end."""
    run_id = str(uuid.uuid4())
    with output.open("w") as file:  # not a pipe, which a process left behind would keep open
        # torch leaves files behind when its processes are killed.
        environment = {**os.environ, RUN_VARIABLE: run_id, "TMPDIR": str(directory)}
        options: dict[str, Any] = {"env": environment, "cwd": directory, "stdout": file, "stderr": subprocess.STDOUT}
        # Away from our terminal: Ctrl-C is for the soak, which ends its programs.
        process = subprocess.Popen(program.command, start_new_session=True, **options)
    try:
        yield Running(process, run_id, directory)
    finally:
        for pid in processes_of(run_id):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _start_time(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0
