"""Faults between hosts, or of a rank that is alone on its host; where real hosts are, links break like this."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.hosts import Network, hosts_on_a_switch
from lightning_bucketddp.config import Timeouts
from tests.support.doomed_ranks import DoomedRanks, Ended, doomed_ranks
from tests.support.scripts.faults import Fault, fit


@dataclass(frozen=True)
class HostFault:
    """What happens to a run on as many ranks as hosts, once it trains (or, to its network, before it starts)."""

    num_hosts: int = 3
    happens: Callable[[Network, DoomedRanks], None] = lambda network, ranks: None
    before: Callable[[Network], None] = lambda network: None
    afterwards: Callable[[DoomedRanks], None] = lambda ranks: None
    options: dict[str, Any] = field(default_factory=dict)


def pull(host: int) -> Callable[[Network, DoomedRanks], None]:
    return lambda network, ranks: network.pull_cable(host)


def one_way(source: int, target: int) -> Callable[[Network, DoomedRanks], None]:
    return lambda network, ranks: network.disturb(loss=1.0, source=source, target=target)


def kill(rank: int) -> Callable[[Network, DoomedRanks], None]:
    return lambda network, ranks: ranks.send(rank, signal.SIGKILL)


def stop(rank: int) -> Callable[[Network, DoomedRanks], None]:
    return lambda network, ranks: ranks.send(rank, signal.SIGSTOP)


def go_on(rank: int, *, after: int) -> Callable[[DoomedRanks], None]:
    """Continue a rank that was stopped, which nobody can kill from another host, when rank `after` has ended."""

    def happen(ranks: DoomedRanks) -> None:
        ranks.wait_for(f"seen{after}.json")
        ranks.send(rank, signal.SIGCONT)

    return happen


# More ranks would wait for a core, on a machine that has two, for longer than their time-outs.
_AT_A_TIME = 5
STANDS_STILL = {"timeouts": Timeouts(stall_warning_s=2, stall_s=3)}
HOST_FAULTS = {
    "cable of host 3 pulled": HostFault(happens=pull(2)),
    "cable of host 1 pulled": HostFault(happens=pull(0)),
    "host 2 no longer reaches host 3": HostFault(happens=one_way(1, 2)),
    "host 1 no longer reaches host 2": HostFault(happens=one_way(0, 1)),
    "host 2 no longer reaches host 1": HostFault(num_hosts=2, happens=one_way(1, 0)),
    "5% of packets lost": HostFault(before=lambda network: network.disturb(loss=0.05), options={"num_batches": 20}),
    "packets 200 ms late": HostFault(before=lambda network: network.disturb(delay_s=0.2), options={"num_batches": 4}),
    "rank 0 killed": HostFault(happens=kill(0)),
    "rank 2 killed": HostFault(happens=kill(2)),
    "rank 1 raises": HostFault(num_hosts=2, options={"fault": Fault("raise")}),
    "rank 1 sleeps": HostFault(num_hosts=2, options={"fault": Fault("sleep"), **STANDS_STILL}),
    "rank 0 stopped": HostFault(num_hosts=2, happens=stop(0), afterwards=go_on(0, after=1), options=STANDS_STILL),
    "rank 1 stopped": HostFault(num_hosts=2, happens=stop(1), afterwards=go_on(1, after=0), options=STANDS_STILL),
}


@dataclass(frozen=True)
class EndOfFault:
    """A run that has ended, and when the fault happened."""

    ended: Ended
    happened_at: float

    @property
    def seconds(self) -> float:
        """From the fault until the last rank that is not stopped was gone, its callbacks included."""
        fault = self.ended.results.get("fault", {"at": self.happened_at})
        return self.ended.at - float(fault["at"])


def let_happen(faults: dict[str, HostFault], directory: Path) -> dict[str, EndOfFault]:
    """Let all of it happen in networks that know nothing of each other, a few at a time."""
    names = list(faults)
    ends: dict[str, EndOfFault] = {}
    for first in range(0, len(names), _AT_A_TIME):
        ends |= _let_happen_together({name: faults[name] for name in names[first : first + _AT_A_TIME]}, directory)
    return ends


def _let_happen_together(faults: dict[str, HostFault], directory: Path) -> dict[str, EndOfFault]:
    with ExitStack() as stack:
        running = {}
        for name, fault in faults.items():
            (directory / name).mkdir()
            network = stack.enter_context(hosts_on_a_switch(fault.num_hosts))
            fault.before(network)
            options = {"pause_after_s": 0.05, **fault.options}
            placed: dict[str, Any] = {"hosts": network.hosts, "world_size": fault.num_hosts}
            ranks = stack.enter_context(doomed_ranks(fit, directory=directory / name, **placed, **options))
            running[name] = network, ranks

        def end(name: str) -> EndOfFault:
            network, ranks = running[name]
            ranks.wait_for("training.json")
            happened_at = time.time()
            faults[name].happens(network, ranks)
            faults[name].afterwards(ranks)
            return EndOfFault(ranks.wait(), happened_at)

        # Each has its own thread: one that begins late, over a bad network, shall not let another train to its end.
        threads = stack.enter_context(ThreadPoolExecutor(len(running)))
        return dict(zip(running, threads.map(end, running), strict=True))
