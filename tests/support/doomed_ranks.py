"""Ranks for tests that end them badly: real processes, made in a moment, that nobody else needs.

    with doomed_ranks(job, directory=tmp_path, some_argument=3) as ranks:
        ranks.send(1, signal.SIGTERM)
        ended = ranks.wait()

To Lightning they look like processes that torchrun has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from benchmarks.hosts import Host
from benchmarks.ports import own_port
from tests.support.forks import PROCESSES

TIMEOUT_S = 200


@dataclass(frozen=True)
class Ended:
    """Ranks that have ended, what each has printed, and what they have written into `*.json` files, by name."""

    exit_codes: list[int]
    output: list[str]
    results: dict[str, Any]
    at: float  # when the last of them was gone


@dataclass(frozen=True)
class DoomedRanks:
    """Ranks that run."""

    processes: list[BaseProcess]
    directory: Path

    def send(self, rank: int, number: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def wait_for(self, file: str) -> None:
        """Wait until a rank has written `file`."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (self.directory / file).exists():
            assert time.monotonic() < deadline, f"no {file}\n{self._output()}"
            assert any(process.is_alive() for process in self.processes), self._output()
            time.sleep(0.01)

    def wait(self) -> Ended:
        """Wait until all have ended, or fail."""
        deadline = time.monotonic() + TIMEOUT_S
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.1))
        at = time.time()
        running = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        assert not running, f"ranks {running} still run\n{self._output()}"
        results = {file.stem: json.loads(file.read_text()) for file in self.directory.glob("*.json")}
        return Ended([p.exitcode or 0 for p in self.processes], self._output(), results, at)

    def _output(self) -> list[str]:
        files = [self.directory / f"rank{rank}.txt" for rank in range(len(self.processes))]
        return [file.read_text() if file.exists() else "" for file in files]


@contextlib.contextmanager
def doomed_ranks(
    job: Callable[..., None],
    *,
    directory: Path,
    world_size: int = 2,
    hosts: Sequence[Host] = (),
    address: str | None = None,
    **kwargs: Any,
) -> Iterator[DoomedRanks]:
    """Run `job(**kwargs, directory=directory)` on ranks; none of them is left at the end.

    On `hosts` each has as many; `address` is the main one, if it is not that of the first host.
    """
    port = own_port()
    local_world_size = world_size // max(len(hosts), 1)
    address = address or (hosts[0].address if hosts else "127.0.0.1")
    processes: list[BaseProcess] = []
    try:
        for rank in range(world_size):
            host, local_rank = divmod(rank, local_world_size)
            variables = {
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "tests",
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "GROUP_RANK": str(host),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(local_world_size),
            }
            arguments = (job, variables, hosts[host] if hosts else None, directory, kwargs)
            process = PROCESSES.Process(target=_run, args=arguments, name=f"rank {rank}")
            process.start()
            processes.append(process)
        yield DoomedRanks(processes, directory)
    finally:
        for started in processes:
            started.kill()
            started.join()


def _run(
    job: Callable[..., None], variables: dict[str, str], host: Host | None, directory: Path, kwargs: dict[str, Any]
) -> None:
    output = os.open(directory / f"rank{variables['RANK']}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if host is not None:
        host.enter()
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork server ignores it
    torch.set_num_threads(1)
    job(directory=directory, **kwargs)
