"""Processes for a benchmark: each rank builds the benchmark once and then does what it is asked for.

    with Ranks(Loop, settings, Place(device="cpu", num_ranks=2)) as ranks:
        seconds = ranks.slowest("turn", "ddp")      # Loop(settings, device).turn("ddp"), on all ranks at once

A bench that has a method `close` is closed before another one takes its place. One that has an attribute `pause` gets
a function there, which answers a call from within its method and waits for the arguments of the next; None: no other.

The process that asks decides whose turn it is. So variants can take turns within one group of ranks and between two.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ports import own_port

_REPOSITORY = str(Path(__file__).parents[1])
_STUCK_AFTER = timedelta(minutes=5)
_END_WITHIN_S = 5

# In the environment of each rank: how many there are.
NUM_RANKS = "BENCHMARK_NUM_RANKS"

# Who would print between the rows of a table; errors are told by the process that asks.
_SILENT = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_bucketddp")

# Built on each rank from the settings, which can be pickled.
Bench = Callable[[Any, torch.device], Any]


class RankFailed(Exception):
    """A rank raised or died."""


@dataclass(frozen=True)
class Place:
    """Where ranks run.

    Attributes:
        device: `cpu` (gloo) or `cuda` (NCCL).
        num_ranks: how many processes there are.
        variables: their environment, beside what they inherit.
        address: where rank 0 can be reached by the others.
        have_group: whether the ranks are in a process group from the start. Else the first who needs one makes it, as
            in a user's program.
        within: by rank, a command that runs the rest of its command line on another host of this machine, for example
            `nsenter`. Empty: all run here.
    """

    device: str = "cpu"
    num_ranks: int = 2
    variables: Mapping[str, str] = field(default_factory=dict)
    address: str = "127.0.0.1"
    have_group: bool = True
    within: Sequence[Sequence[str]] = ()

    def __str__(self) -> str:
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        return f"{ranks} ({'NCCL' if self.device == 'cuda' else 'gloo'})"


@dataclass(frozen=True)
class _Start:
    """What a rank is told first."""

    rank: int
    port: int
    place: Place


class Ranks:
    """Processes in one process group, each with a `bench` of its own.

    Args:
        bench: a class of an importable module; its methods can be called then.
        settings: what it is built from.
        place: where the ranks run.
    """

    def __init__(self, bench: Bench, settings: Any, place: Place) -> None:
        port = own_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._uses_gpu = place.device == "cuda"
        for rank in range(place.num_ranks):
            ours, theirs = Pipe()
            within = place.within[rank] if place.within else ()
            command = [*within, sys.executable, "-W", "ignore", "-m", "benchmarks.ranks", str(theirs.fileno())]
            path = os.pathsep.join([_REPOSITORY, *filter(None, [os.environ.get("PYTHONPATH")])])
            environment = {**os.environ, "PYTHONPATH": path, **place.variables}
            self._processes.append(subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]))
            theirs.close()
            self._pipes.append(ours)
            ours.send(_Start(rank, port, place))
        self.build(bench, settings)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if self._uses_gpu:
                # A process that is killed can take the others along that share a GPU with it by MPS.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_END_WITHIN_S)
            process.kill()  # there is nothing to save, and a rank may wait for one that has failed
        for process in self._processes:
            process.wait()

    def build(self, bench: Bench, settings: Any) -> None:
        """Have another bench instead of the one that there is."""
        for pipe in self._pipes:
            pipe.send((bench, settings))

    def call(self, method: str, *args: Any) -> list[Any]:
        """What `method` returns, by rank."""
        for pipe in self._pipes:
            pipe.send((method, args))
        values: dict[int, Any] = {}
        while len(values) < len(self._pipes):
            for ready in wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in values]):
                rank = self._pipes.index(ready)  # type: ignore[arg-type]
                # The first failure ends it: the other ranks may wait for this one for ever.
                values[rank] = self._receive(rank, method)
        return [values[rank] for rank in range(len(self._pipes))]

    def slowest(self, method: str, *args: Any) -> float:
        """The largest of the ranks' numbers: a step has ended when the last rank has made it."""
        return max(self.call(method, *args))

    def _receive(self, rank: int, method: str) -> Any:
        try:
            value, error = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            raise RankFailed(f"Rank {rank} died in `{method}`; its output says why.") from None
        if error is not None:
            raise RankFailed(f"Rank {rank} failed in `{method}`:\n{error}")
        return value


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _serve(pipe: Connection) -> None:
    start: _Start = pipe.recv()
    place = start.place
    # For a Trainer in this process: one node per rank, because several ranks may share a device.
    os.environ.update(MASTER_ADDR=place.address, MASTER_PORT=str(start.port), NODE_RANK=str(start.rank), LOCAL_RANK="0")
    os.environ[NUM_RANKS] = str(place.num_ranks)
    device = _device(start.rank, place)
    if place.have_group:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{place.address}:{start.port}",
            rank=start.rank,
            world_size=place.num_ranks,
            timeout=_STUCK_AFTER,
        )
    bench = None
    build: Callable[[], Any] = dict
    while True:
        try:
            asked, args = pipe.recv()
        except EOFError:
            _close(bench)
            return
        if not isinstance(asked, str):
            _close(bench)
            bench, build = None, functools.partial(asked, args, device)
            gc.collect()  # what the last one leaves behind
            if device.type == "cuda":
                torch.cuda.empty_cache()
            for name in _SILENT:  # here, because Lightning sets its level when the bench's module imports it
                logging.getLogger(name).setLevel(logging.ERROR)
            continue
        try:
            bench = build() if bench is None else bench
            if hasattr(bench, "pause"):
                bench.pause = functools.partial(_pause, pipe)
            pipe.send((getattr(bench, asked)(*args), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))


def _pause(pipe: Connection, value: Any) -> Any:
    pipe.send((value, None))
    try:
        _, args = pipe.recv()
    except EOFError:
        return None
    return args


def _close(bench: Any) -> None:
    if hasattr(bench, "close"):
        bench.close()


def _device(rank: int, place: Place) -> torch.device:
    if place.device == "cpu":
        # Ranks share the cores. The Trainer believes that each is alone on its node, and asks this variable.
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if place.num_ranks > num_devices:
        # NCCL refuses two ranks of one host on one GPU: each rank gets a host of its own.
        os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo")
    device = torch.device("cuda", rank % num_devices)
    torch.cuda.set_device(device)
    return device


if __name__ == "__main__":
    from benchmarks.ranks import _serve as serve  # not this module's: what is unpickled belongs to the imported one

    serve(Connection(int(sys.argv[1])))
