"""Real processes for tests: one pool per world size, started once and reused by every test.

    ranks = run_on_ranks(job, world_size=2, some_argument=3)    # [job(...) on rank 0, job(...) on rank 1]

If it raises on any rank, so does `run_on_ranks`, with every rank's traceback. A test that is all job says so:

    @on_ranks(2)
    def test_ranks_add_up() -> None: ...    # runs on each rank, and asserts there
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ports import own_port
from tests.support.forks import PROCESSES

_GRACE_AFTER_FAILURE_S = 5.0
# Long: on a machine with seven times as many busy processes as cores, jobs of 6 s took a minute.
_HUNG_AFTER_S = 240.0


class RankFailed(Exception):
    """A job raised, died or hung on some rank; `values` are what it returned on the others, by rank."""

    def __init__(self, text: str, values: dict[int, Any] | None = None) -> None:
        super().__init__(text)
        self.values = values or {}


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    error: str | None = None
    has_group: bool = True


class RankPool:
    """`world_size` processes in one process group, waiting for jobs."""

    def __init__(self, world_size: int, backend: str) -> None:
        # A process that is forked can use a GPU only if the one that it is forked from has not looked for any.
        context = PROCESSES if device().type == "cpu" else multiprocessing.get_context("spawn")
        port = own_port()
        # Where each process writes what all its threads do when it is made to end.
        self._stacks = [tempfile.NamedTemporaryFile(prefix="bucketddp-stacks-") for _ in range(world_size)]  # noqa: SIM115
        # Still one process group: a run that was ended, where ranks came late on a busy machine, has left it.
        self.is_whole = True
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, world_size, backend, port, self._stacks[rank].name),
                daemon=True,
                name=f"rank {rank}",
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def run(
        self,
        job: Callable[..., Any],
        timeout_s: float,
        kwargs: dict[str, Any],
        *,
        grace_s: float = _GRACE_AFTER_FAILURE_S,
    ) -> list[Any]:
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # a process that died is reported when its answer is missing
                pipe.send((job, kwargs))
        outcomes = self._collect(timeout_s, grace_s)
        self.is_whole = all(outcome.has_group for outcome in outcomes)
        failures = [f"--- rank {rank} ---\n{o.error}" for rank, o in enumerate(outcomes) if o.error is not None]
        if failures:
            text = "\n".join([f"{job.__module__}.{job.__qualname__}({kwargs})", *failures])
            raise RankFailed(text, {rank: o.value for rank, o in enumerate(outcomes) if o.error is None})
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def _collect(self, timeout_s: float, grace_s: float) -> list[_Outcome]:
        outcomes: dict[int, _Outcome] = {}
        deadline = time.monotonic() + timeout_s
        while len(outcomes) < len(self._pipes):
            awaited = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in outcomes}
            for pipe in wait(list(awaited), timeout=max(deadline - time.monotonic(), 0)):
                rank = awaited[pipe]  # type: ignore[index]
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].error is not None:
                    # The others may wait for this rank for ever.
                    deadline = min(deadline, time.monotonic() + grace_s)
            if time.monotonic() > deadline:
                for process in self._processes:
                    if process.pid is not None and process.is_alive():
                        os.kill(process.pid, signal.SIGABRT)
                        process.join(_GRACE_AFTER_FAILURE_S)
                self.close()
                break
        return [
            outcomes.get(rank, _Outcome(error=f"still running; killed\n{self._stack_of(rank)}"))
            for rank in range(len(self._pipes))
        ]

    def _receive(self, rank: int) -> _Outcome:
        try:
            outcome: _Outcome = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join()
            return _Outcome(error=f"died with exit code {self._processes[rank].exitcode}\n{self._stack_of(rank)}")
        return outcome

    def _stack_of(self, rank: int) -> str:
        return self._stacks[rank].read().decode()


_pools: dict[tuple[int, str], RankPool] = {}


def run_on_ranks(
    job: Callable[..., Any],
    *,
    world_size: int = 2,
    timeout_s: float = _HUNG_AFTER_S,
    grace_s: float = _GRACE_AFTER_FAILURE_S,
    backend: str | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run `job(**kwargs)` on every rank and return the results by rank; after a failure others have `grace_s`."""
    key = (world_size, backend or _default_backend())
    if key in _pools and not _pools[key].is_whole:
        _pools.pop(key).close()
    if key not in _pools:
        _pools[key] = RankPool(*key)
    try:
        return _pools[key].run(job, timeout_s, kwargs, grace_s=grace_s)
    except RankFailed:
        # Ranks that failed at different places no longer agree on the next collective: start afresh.
        _pools.pop(key).close()
        raise


_bodies: dict[tuple[str, str], Callable[..., None]] = {}


def on_ranks(world_size: int = 2, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have the body of a test run on each rank, `world_size` of them unless that is an argument of the test."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        place = (test.__module__, test.__qualname__)
        _bodies[place] = test

        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            number = arguments.get("world_size", world_size)
            run_on_ranks(_run_body, world_size=number, **options, place=place, arguments=arguments)

        return run

    return decorate


def _run_body(place: tuple[str, str], arguments: dict[str, Any]) -> None:
    import_module(place[0])  # which puts the body into its place
    _bodies[place](**arguments)


def raised_by(call: Callable[[], Any]) -> str:
    """The class and the text of what `call` raises; nothing if it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def close_pools() -> None:
    """End every process that this module started."""
    while _pools:
        _pools.popitem()[1].close()


atexit.register(close_pools)


def pids_of_pools() -> list[int]:
    """The processes of all pools that are open."""
    return [pid for pool in _pools.values() for pid in pool.pids]


def device() -> torch.device:
    """Where jobs put their tensors: `BUCKETDDP_TEST_DEVICE`, or the CPU."""
    return torch.device(os.environ.get("BUCKETDDP_TEST_DEVICE", "cpu"))


def use_gpu() -> None:
    """Have the ranks that are started from now on share the first GPU; what they and this process compute repeats."""
    os.environ.setdefault("BUCKETDDP_TEST_DEVICE", "cuda:0")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = True


def _default_backend() -> str:
    return "nccl" if device().type == "cuda" else "gloo"


def _serve(pipe: Connection, rank: int, world_size: int, backend: str, port: int, stacks: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork server ignores it
    stacks_file = open(stacks, "w")  # noqa: SIM115  (needed to the end)
    faulthandler.enable(stacks_file)
    torch.set_num_threads(1)  # results must not depend on how busy the machine is
    if device().type == "cuda":
        use_gpu()
        torch.cuda.set_device(device())
        # NCCL refuses two ranks of one host on one GPU: give each rank a host of its own.
        os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo")
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    while True:
        try:
            job, kwargs = pipe.recv()
        except (EOFError, OSError):
            sys.exit(0)
        torch.manual_seed(0)
        # Again: a Trainer that ends sets the handlers of all signals that Python knows of, which has none of this one.
        faulthandler.disable()
        faulthandler.enable(stacks_file)
        try:
            value = job(**kwargs)
            outcome = _Outcome(value, has_group=dist.is_initialized())
        except BaseException:
            outcome = _Outcome(error=traceback.format_exc())
        # Finalizers of what the job has left run here. In the middle of a later import, where the collector may come to
        # them, one that imports something makes that import fail before Python 3.12.1 (python/cpython#106176).
        gc.collect()
        pipe.send(outcome)
