"""A training program that runs, with all its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_bucketddp.processes import process_start_time
from tests.soak.trial import MAX_RESTARTS, Fault
from tests.startup.test_clusters import slurm_job, slurm_task
from tests.support.hosts import Network
from tests.support.programs import processes_of
from tests.support.warm import RUN_VARIABLE

# Starting takes seconds, and minutes where the machine has other things to do.
BEGINS_WITHIN_S = 180.0
_LOOK_EVERY_S = 0.01
_TORCHRUN = ("-m", "torch.distributed.run")
# torchrun's own defaults wait 15 s for a host that does not answer, and 30 s for one that may yet come.
_RENDEZVOUS = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3"


@dataclass(frozen=True)
class Program:
    """A script that a launcher starts in a `python`, as the end of `within`, or on `hosts` of a `network`."""

    script: Path
    launcher: str
    settings: dict[str, Any]
    python: str
    within: Sequence[str] = ()
    network: Network | None = None
    hosts: Sequence[int] = ()
    num_starts: int = 0

    def tasks(self) -> list[tuple[Sequence[str], dict[str, str]]]:
        """Return commands, each with the variables that it has in its environment."""
        start_method = self.launcher if self.launcher in ("spawn", "fork") else "popen"
        script = (str(self.script), json.dumps({**self.settings, "start_method": start_method}))
        on_one_host = (*_TORCHRUN, "--standalone", "--nproc-per-node=2")
        if self.launcher == "hosts":
            return [(self._on_host(number, script), {}) for number in self.hosts]
        if self.launcher == "slurm":
            job = {**slurm_job(num_nodes=1), "SLURM_RESTART_COUNT": str(self.num_starts)}
            command = (*self.within, self.python, *script)
            return [(command, {**job, **slurm_task(rank, num_nodes=1)}) for rank in (0, 1)]
        by = {"torchrun": on_one_host, "elastic": (*on_one_host, f"--max-restarts={MAX_RESTARTS}")}
        return [((*self.within, self.python, *by.get(self.launcher, ()), *script), {})]

    def _on_host(self, number: int, script: Sequence[str]) -> Sequence[str]:
        assert self.network is not None
        host, first = self.network.hosts[number], self.network.hosts[self.hosts[0]]
        # A name of its own, too, by which ranks tell hosts apart.
        named = ("sh", "-c", 'hostname "$0" && exec "$@"', f"host{number}")
        rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint={first.address}:29400", "--rdzv-id=soak")
        settings = (f"--rdzv-conf={_RENDEZVOUS},is_host={int(host is first)}", f"--local-addr={host.address}")
        sizes = ("--nnodes=1:2", "--nproc-per-node=1", f"--max-restarts={MAX_RESTARTS}")
        return (*host.within, *named, self.python, *_TORCHRUN, *sizes, *rendezvous, *settings, *script)


class Running:
    """The processes of one program, and what they have written."""

    def __init__(self, program: Program, processes: dict[str, subprocess.Popen[bytes]], directory: Path) -> None:
        self._program = program
        self._started = processes  # by the number that all processes of a task have in their environment
        self._directory = directory
        self.began_at = time.monotonic()
        self.pids: set[int] = set()
        self._cut_off: list[str] = []

    @property
    def exit_status(self) -> int | None:
        """Return that of the program; None: it has not ended. Of several hosts one is enough to complete a run."""
        statuses = [process.poll() for process in self._started.values()]
        if None in statuses:
            return None
        if self._program.launcher == "hosts" and 0 in statuses:
            return 0
        return next((status for status in statuses if status), 0)

    @property
    def processes(self) -> list[int]:
        found = [pid for run_id in self._started for pid in processes_of(run_id)]
        self.pids.update(found)
        return found

    def read(self, name: str) -> dict[str, Any]:
        """Return what the program has written under `name`, so far."""
        with suppress(FileNotFoundError):
            return dict(json.loads((self._directory / f"{name}.json").read_text()))
        return {}

    def reports(self) -> list[dict[str, Any]]:
        """Return the reports of the ranks after each step since the program began, in order of time."""
        found = []
        for rank in (0, 1):
            with suppress(FileNotFoundError):
                lines = (self._directory / f"rank{rank}.jsonl").read_text().splitlines()
                found += [{**json.loads(line), "rank": rank} for line in lines]
        return sorted((one for one in found if one["at"] > self.began_at), key=lambda report: report["at"])

    def wait_for(self, is_there: Callable[[], bool], *, since: float) -> bool:
        """Wait until `is_there`; return False if the program ends before, or takes too long."""
        while not is_there():
            if self.exit_status is not None or time.monotonic() > since + BEGINS_WITHIN_S:
                return False
            time.sleep(_LOOK_EVERY_S)
        return True

    def wait_for_step(self, step: int, *, since: float) -> bool:
        """Wait until both ranks of a start after `since` come to `step`; return False as `wait_for` does."""

        def is_there() -> bool:
            done = {one["rank"] for one in self.reports() if one["step"] > step and one["attempt"] > since}
            return len(done) == 2

        return self.wait_for(is_there, since=since)

    def bring(self, fault: Fault) -> float:
        """Make `fault` happen to processes of this program from outside; return when."""
        if fault.what in ("lost-cable", "lost-host"):
            assert self._program.network is not None
            self._program.network.pull_cable(int(fault.target))
            if fault.what == "lost-cable" or fault.target == 0:
                self._cut_off = list(self._started)[1:]
        at = time.monotonic()
        for pid in self._pids_of(fault):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.Signals[fault.signal or "SIGKILL"])
        return at

    def _pids_of(self, fault: Fault) -> list[int]:
        run_ids, target = list(self._started), fault.target
        if fault.what == "lost-cable":
            return []
        if fault.what == "lost-host":
            return processes_of(run_ids[int(target)])
        if target == "launcher" or fault.what == "lost-agent":
            process = self._started[run_ids[0 if target == "launcher" else int(target)]]
            return [process.pid] if process.poll() is None else []
        if target in ("all", "newest"):
            pids = sorted(self.processes, key=process_start_time)
            return pids if target == "all" else pids[-1:]
        of_rank = {one["rank"]: one["pid"] for one in self.reports()}
        wanted = [of_rank.get(rank) for rank in ((0, 1) if target == "ranks" else (target,))]
        return [pid for pid in self.processes if pid in wanted]

    def wait(self, *, until: Callable[[], float]) -> list[int]:
        """Wait until all processes have ended; return those that have not when it is `until`."""
        while processes := self.processes:
            if time.monotonic() > until():
                return processes
            self._end_agent_without_store()
            for process in self._started.values():
                process.poll()
            time.sleep(0.05)
        for process in self._started.values():
            process.wait()
        return []

    def _end_agent_without_store(self) -> None:
        """End the processes of a host that is cut off from torchrun's store when its ranks have ended.

        An operator has to do so: torchrun waits for its store until the kernel gives up, after a quarter of an hour.
        """
        ranks = {one["pid"] for one in self.reports()} if self._cut_off else set()
        for run_id in self._cut_off:
            left = processes_of(run_id)
            if not ranks & set(left):
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


@contextmanager
def running(program: Program, *, directory: Path, output: Path) -> Iterator[Running]:
    """Start `program`; none of its processes is left at the end."""
    temporary = directory / "tmp"
    temporary.mkdir(exist_ok=True)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    run: Running | None = None
    try:
        with output.open("w") as file:  # not a pipe, which a process left behind would keep open
            for command, variables in program.tasks():
                run_id = str(uuid.uuid4())
                path = f"{directory}/bin{os.pathsep}{os.environ['PATH']}"
                environment = {**os.environ, RUN_VARIABLE: run_id, "TMPDIR": str(temporary), "PATH": path}
                # Away from our terminal: Ctrl-C is for the soak, which ends its programs.
                processes[run_id] = subprocess.Popen(
                    command,
                    env={**environment, **variables},
                    cwd=directory,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        run = Running(program, processes, directory)
        yield run
    finally:
        for run_id, process in processes.items():
            for pid in processes_of(run_id):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
