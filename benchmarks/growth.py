"""What grows with the number of ranks: the exchange between hosts in each step, set-up, and the watch over ranks.

    python -m benchmarks.growth                                  exchange of 2 to 32 processes, set-up of 64
    python -m benchmarks.growth --exchange 2 8 --set-up 16
    TORCH_GLOO_LAZY_INIT=1 python -m benchmarks.growth --exchange --set-up 64

Exchange: a message from every rank to all, by gloo's all-gather and as a step does it, in turns, one after the other.
Set-up: what each phase takes, and what it asks of the store. All processes run on this machine, forked from this one.
More of them than cores measure the scheduler; rounds, operations of the store, and connections are the same anywhere.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.command import write
from benchmarks.ports import own_port
from benchmarks.report import Table
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import MessageKind, StepExchange
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.faults.heartbeat import HeartbeatMonitor
from lightning_bucketddp.faults.progress import Progress
from lightning_bucketddp.faults.side_channel import SideChannel
from lightning_bucketddp.faults.watchdog import Watchdog, WatchdogActions
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.startup.rendezvous import Rendezvous
from lightning_bucketddp.startup.store import StoreAddress

_STUCK_AFTER = timedelta(minutes=5)
_STORE_OPERATIONS = ("set", "get", "add", "check", "wait", "compare_set", "multi_get", "multi_set", "append")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"exchange": (2, 4, 8, 16, 32), "set-up": (64,)}
    for name, default in sizes.items():
        text = f"numbers of processes (default: {' '.join(map(str, default))})"
        parser.add_argument(f"--{name}", type=int, nargs="*", default=default, metavar="N", help=text)
    parser.add_argument("--repetitions", type=int, default=10, help="turns of each exchange (default: 10)")
    parser.add_argument("--watch", type=float, default=10.0, metavar="SECONDS", help="of the watchdog (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers here")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw them here (needs matplotlib)")
    args = parser.parse_args(arguments)
    tables = []
    if args.exchange:
        tables.append(exchange_table(args.exchange, repetitions=args.repetitions))
        print(tables[0], flush=True)
    for num_ranks in args.set_up:
        tables.append(set_up_table(num_ranks, watch_s=args.watch))
        print(tables[-1], flush=True)
    write(tables, args, place="gloo, one machine")


def exchange_table(sizes: Sequence[int], *, repetitions: int) -> Table:
    """Medians of the slowest rank, and of the CPU time of a rank."""
    rows: dict[str, list[float]] = {}
    for num_ranks in sizes:
        by_rank = run_forked(time_exchanges, num_ranks, repetitions=repetitions)
        turns = list(zip(*by_rank, strict=True))
        slowest = statistics.median(max(rank.ms for rank in turn) for turn in turns)
        rows[str(num_ranks)] = [slowest, statistics.median(statistics.mean(r.cpu_ms for r in turn) for turn in turns)]
    columns = ["ms", "CPU ms"]
    return Table("a message from every rank to all, by number of processes", columns, rows, plot="lines")


@dataclass(frozen=True)
class Turn:
    """What one exchange took, and what CPU time of this process."""

    ms: float
    cpu_ms: float


def time_exchanges(rank: int, world_size: int, port: int, *, repetitions: int, per_turn: int = 20) -> list[Turn]:
    """Exchange messages as in a step, on this rank."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=_STUCK_AFTER)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_STUCK_AFTER)
    collectives = Collectives(torch.device("cpu"))
    exchange = StepExchange(collectives)
    turns = []
    for _ in range(repetitions):
        dist.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(per_turn):
            exchange.send(MessageKind.STEP, weight=1)
            exchange.receive()
        taken, cpu = time.perf_counter() - began, time.process_time() - cpu_began
        turns.append(Turn(1e3 * taken / per_turn, 1e3 * cpu / per_turn))
    dist.barrier()
    return turns


def set_up_table(num_ranks: int, *, watch_s: float) -> Table:
    """What each phase takes of the slowest rank, and what a rank costs."""
    by_rank = run_forked(time_phases, num_ranks, watch_s=watch_s)
    rows = {}
    for name in by_rank[0]:
        phases = [phases[name] for phases in by_rank]
        rows[name] = [
            max(phase.seconds for phase in phases),
            statistics.mean(phase.cpu_s for phase in phases),
            statistics.mean(phase.num_asked for phase in phases),
            max(phase.num_asked for phase in phases),
            phases[0].num_sockets,
            phases[0].mib,
        ]
    columns = ["seconds", "CPU s, a rank", "store: asked by a rank", "by the busiest", "sockets, rank 0", "MiB, rank 0"]
    lazy = " with TORCH_GLOO_LAZY_INIT" if os.environ.get("TORCH_GLOO_LAZY_INIT") == "1" else ""
    return Table(f"set-up of {num_ranks} processes{lazy}", columns, rows)


@dataclass
class Phase:
    """What a phase took on this rank; sockets and peak memory are as they were at its end."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    num_asked: int = 0
    num_sockets: int = 0
    mib: float = 0.0


@dataclass
class Phases:
    """Measures phases one after the other; each begins on all ranks at once, if there is a group by then."""

    asked: Counter[str] = field(default_factory=Counter)
    found: dict[str, Phase] = field(default_factory=dict)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        if dist.is_initialized():
            dist.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        yield
        taken, cpu = time.perf_counter() - began, time.process_time() - cpu_began
        links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
        num_sockets = sum(os.path.islink(link) and os.readlink(link).startswith("socket:") for link in links)
        mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        # Also for the barrier before it: connections that are made on demand may be made there.
        num_asked = self.asked.total() - sum(phase.num_asked for phase in self.found.values())
        self.found[name] = Phase(taken, cpu, num_asked, num_sockets, mib)


class CountingStore(dist.Store):
    """Counts what is asked of a store, each key of a question by itself."""

    def __init__(self, store: Any, asked: Counter[str]) -> None:
        super().__init__()
        self._store = store
        self._asked = asked

    def clone(self) -> CountingStore:
        return CountingStore(self._store.clone(), self._asked)

    @property
    def timeout(self) -> timedelta:
        timeout: timedelta = self._store.timeout
        return timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)


def _counting(name: str) -> Callable[..., Any]:
    def ask(self: CountingStore, *args: Any) -> Any:
        self._asked[name] += len(args[0]) if isinstance(args[0], list) else 1
        return getattr(self._store, name)(*args)

    return ask


for _name in _STORE_OPERATIONS:
    setattr(CountingStore, _name, _counting(_name))


def time_phases(rank: int, world_size: int, port: int, watch_s: float) -> dict[str, Phase]:
    """Set up this rank as a strategy does, and train a step; return what each phase took."""
    phases = Phases()
    with phases.during("rendezvous"):
        address = StoreAddress(address="127.0.0.1", port=port, rank=rank, world_size=world_size, local_rank=rank)
        store = Rendezvous(address, timeout_s=300).meet(listener=None, find_failure=lambda: None)
    store.set_timeout(_STUCK_AFTER)
    counting = CountingStore(store, phases.asked)
    with phases.during("process group"):
        dist.init_process_group("gloo", store=counting, rank=rank, world_size=world_size, timeout=_STUCK_AFTER)
    collectives = Collectives(torch.device("cpu"), timeout=_STUCK_AFTER)
    with phases.during("a further group"):
        collectives.host_group()
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    replicas = Replicas(model, collectives)
    with phases.during("agreement on parameters"):
        replicas.agree()
    with phases.during("weights of rank 0"):
        replicas.broadcast()
    reducer = Reducer(replicas, ReducerConfig())
    for name in ("first backward", "second backward", "third backward"):
        with phases.during(name), reducer.backward():
            model(torch.ones(2, 64)).sum().backward()
    with phases.during("1,000 questions to the store"):
        for _ in range(1000):
            counting.check(["run/failure"])
    counted = CountingStore(store.clone(), phases.asked)
    channel = SideChannel(counted, name="run", rank=rank, world_size=world_size, store_rank=0)
    actions = WatchdogActions(
        cut=_nothing,
        interrupt=_nothing,
        signals_received=lambda: (),
        exit_status_of=lambda _: None,
        launcher_pid=None,
        claim_file=lambda _: False,
    )
    monitor = HeartbeatMonitor(channel, Progress(waiting_in=()), warn_after_s=600, timeout_s=1800)
    watchdog = Watchdog(monitor, actions)
    with phases.during(f"watchdog, first {watch_s:g} s"):
        watchdog.start()
        time.sleep(watch_s)
    with phases.during(f"watchdog, later {watch_s:g} s"):
        time.sleep(watch_s)
    dist.barrier()
    watchdog.stop()
    return phases.found


def _nothing() -> None:
    pass


def run_forked(job: Callable[..., Any], num_ranks: int, **kwargs: Any) -> list[Any]:
    """Return what `job` returns on each rank, in processes that need not import anything."""
    context = multiprocessing.get_context("fork")
    # No store here: a process that is forked while threads run may wait for ever for what they had locked.
    port = own_port()
    pipes, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(theirs, job, (rank, num_ranks, port), kwargs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    outcomes: dict[Any, Any] = {}
    while len(outcomes) < num_ranks:
        for pipe in wait([pipe for pipe in pipes if pipe not in outcomes]):
            outcomes[pipe] = pipe.recv()
            if isinstance(outcomes[pipe], str):
                for process in processes:
                    process.kill()
                raise RuntimeError(outcomes[pipe])
    for process in processes:
        process.join()
    return [outcomes[pipe] for pipe in pipes]


def _serve(pipe: Connection, job: Callable[..., Any], place: tuple[int, int, int], kwargs: Mapping[str, Any]) -> None:
    torch.set_num_threads(1)  # they share the cores
    try:
        pipe.send(job(*place, **kwargs))
    except BaseException:
        pipe.send(traceback.format_exc())
    time.sleep(1 if place[0] == 0 else 0)  # the store is with rank 0
    os._exit(0)


if __name__ == "__main__":
    main()
