"""What many ranks ask of the store: no more in all than it can answer, however many they are."""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_bucketddp.comm.connections import Connections
from lightning_bucketddp.faults.failure import Failure, Kind
from lightning_bucketddp.faults.heartbeat import HeartbeatMonitor
from lightning_bucketddp.faults.progress import Progress
from lightning_bucketddp.faults.side_channel import GuardedStore, LocalRanks, SideChannel, introduce, place
from lightning_bucketddp.faults.watchdog import Watchdog, WatchdogActions
from tests.support.cases import for_each


class CountedStore:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self._store = HashStore()

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any) -> Any:
            self.asked[name] += 1
            return getattr(self._store, name)(*args)

        return ask


def channel_of(store: Any, *, rank: int = 0, world_size: int) -> SideChannel:
    return SideChannel(store, name="run", rank=rank, world_size=world_size)


def asked_until_ranks_are_known(world_size: int, num_local: int) -> int:
    """Return what rank 0 asks to find the processes on its host, of which there are `num_local`."""
    store = CountedStore()
    others = channel_of(store, world_size=world_size)
    for rank in range(world_size):
        others.rank = rank
        introduce(others, pid=os.getpid(), place=place() if rank < num_local else f"host {rank // num_local}")
    others.close()
    channel = channel_of(store, world_size=world_size)
    local_ranks = LocalRanks(channel, exit_status_of=lambda _: None)
    store.asked.clear()
    local_ranks.discover()
    assert local_ranks.are_known
    assert sorted(local_ranks._processes) == list(range(1, num_local))
    local_ranks.close()
    channel.close()
    return store.asked.total()


def test_a_rank_asks_for_the_ranks_of_its_own_host_only() -> None:
    assert asked_until_ranks_are_known(256, num_local=4) == asked_until_ranks_are_known(4, num_local=4)


def test_a_rank_that_has_not_introduced_itself_is_looked_for() -> None:
    store = CountedStore()
    here, there = (channel_of(store, rank=rank, world_size=2) for rank in (0, 1))
    local_ranks = LocalRanks(here, exit_status_of=lambda _: None)
    introduce(here, pid=os.getpid(), place=place())
    local_ranks.discover()
    assert not local_ranks.are_known
    introduce(there, pid=os.getppid(), place=place())
    store.asked.clear()
    local_ranks.discover()
    assert store.asked["get"] == 1  # the first one is known
    assert local_ranks.are_known
    assert list(local_ranks._processes) == [1]
    local_ranks.close()
    for channel in (here, there):
        channel.close()


@for_each("world_size", [2, 400, 1024, 10_000, 100_000])
def test_all_ranks_together_ask_no_more_than_the_store_can_answer(world_size: int) -> None:
    channel = channel_of(HashStore(), world_size=world_size)
    assert world_size / channel.interval(0.2) <= 2000
    assert channel.interval(0.2) == 0.2 or world_size > 400
    channel.close()


def watchdog_of(channel: SideChannel, ticked: threading.Semaphore) -> Watchdog:
    def tick() -> tuple[int, ...]:
        ticked.release()
        return ()

    actions = WatchdogActions(
        cut=lambda: None,
        interrupt=lambda: None,
        signals_received=tick,
        exit_status_of=lambda _: None,
        store_rank=None,
        launcher_pid=None,
        claim_file=lambda _: False,
    )
    return Watchdog(channel, Progress(waiting_in=(__file__,)), actions, stall_warning_s=600, timeout_s=1800)


def test_a_rank_among_very_many_looks_at_its_host_without_asking_the_store() -> None:
    store, ticked = CountedStore(), threading.Semaphore(0)
    watchdog = watchdog_of(channel_of(store, world_size=5_000_000), ticked)  # it asks every 40 minutes
    watchdog.start()
    ticked.acquire()
    ticked.acquire()  # the first look is over
    asked = store.asked.total()
    for _ in range(5):
        ticked.acquire()
    assert store.asked.total() == asked
    watchdog.stop()


def test_a_rank_that_does_not_listen_blames_whom_others_blame() -> None:
    channel, ticked = channel_of(HashStore(), world_size=2), threading.Semaphore(0)
    watchdog = watchdog_of(channel, ticked)
    watchdog.start()
    ticked.acquire()
    watchdog._monitor.wait.listens = False
    blamed = Failure(rank=1, kind=Kind.STALLED, what="it no longer answers")
    threading.Timer(0.3, channel.report, [blamed]).start()
    assert watchdog.end_by(RuntimeError("gloo: timed out")) == blamed
    watchdog.stop()


def test_few_of_the_ranks_that_wait_listen_to_all_before_a_time_out() -> None:
    store = CountedStore()
    listening = []
    for rank in range(20):
        channel = channel_of(store, rank=rank, world_size=20)
        progress = Progress(waiting_in=(__file__,))
        progress.follow_this_thread()
        progress.since -= 10
        local_ranks = LocalRanks(channel, exit_status_of=lambda _: None)
        guarded = GuardedStore(channel, local_ranks, Connections(), store_rank=None)
        monitor = HeartbeatMonitor(guarded, progress, warn_after_s=0.1, timeout_s=1)
        monitor.update_wait()
        assert monitor.nears_timeout()
        monitor.anticipate_timeout()
        assert not monitor.nears_timeout()
        listening.append(monitor.wait.listens)
        channel.close()
    assert listening == [True] * 4 + [False] * 16


def test_heartbeats_of_all_ranks_are_read_at_once() -> None:
    store = CountedStore()
    ranks = [channel_of(store, rank=rank, world_size=20) for rank in range(20)]
    for rank in ranks[:-1]:
        rank.set(f"beat/{rank.rank}", {"count": rank.rank})
    missing_one = {rank: {"count": rank} for rank in range(1, 19)}
    assert ranks[0].last_beats() == missing_one
    ranks[-1].set("beat/19", {"count": 19})
    store.asked.clear()
    assert ranks[0].last_beats() == {**missing_one, 19: {"count": 19}}
    assert store.asked.total() == 2
    for rank in ranks:
        rank.close()
