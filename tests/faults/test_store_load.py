"""What many ranks ask of the store: no more in all than it can answer, however many they are."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_bucketddp.faults.failure import Failure, Kind
from lightning_bucketddp.faults.heartbeat import HeartbeatMonitor
from lightning_bucketddp.faults.progress import Progress
from lightning_bucketddp.faults.side_channel import SideChannel
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


@pytest.fixture
def channels() -> Iterator[Callable[..., list[SideChannel]]]:
    """Make channels of the first ranks of a run, which are closed at the end of the test."""
    with ExitStack() as stack:

        def make(num_ranks: int, *, store: Any = None, world_size: int | None = None) -> list[SideChannel]:
            of_all: dict[str, Any] = {"name": "run", "world_size": world_size or num_ranks}
            made = [SideChannel(store or HashStore(), rank=rank, **of_all) for rank in range(num_ranks)]
            for channel in made:
                stack.enter_context(closing(channel))
            return made

        yield make


def test_a_rank_finds_the_processes_of_its_host_when_all_have_introduced_themselves(
    channels: Callable[..., list[SideChannel]],
) -> None:
    store = CountedStore()
    ranks = [channel.local_ranks for channel in channels(20, store=store)]
    for rank, local_ranks in enumerate(ranks):
        ranks[0].discover()
        assert not ranks[0].are_known
        local_ranks.place = "here" if rank in (0, 5, 9) else "elsewhere"
        local_ranks.introduce(os.getpid())
    store.asked.clear()
    ranks[0].discover()
    assert ranks[0].are_known
    assert list(ranks[0].processes) == [5, 9]
    ranks[0].discover()
    assert store.asked == {"add": 1, "check": 1, "multi_get": 1}  # however many ranks there are


def test_a_rank_that_is_gone_before_the_last_has_introduced_itself_has_died(
    channels: Callable[..., list[SideChannel]],
) -> None:
    here, there = (channel.local_ranks for channel in channels(2, store=HashStore()))
    process = subprocess.Popen(["true"])
    there.introduce(process.pid)
    process.wait()
    here.introduce(os.getpid())
    here.discover()
    assert here.gone() == [1]
    failure = here.find_death(lambda rank: -signal.SIGKILL if rank == 1 else None)
    assert failure is not None
    assert (failure.rank, failure.kind) == (1, Kind.DIED)


@for_each("world_size", [2, 400, 1024, 10_000, 100_000])
def test_all_ranks_together_ask_no_more_than_the_store_can_answer(world_size: int) -> None:
    with closing(SideChannel(HashStore(), name="run", rank=0, world_size=world_size)) as channel:
        assert world_size / channel.interval(0.2) <= 2000
        assert channel.interval(0.2) == 0.2 or world_size > 400


def watchdog_of(channel: SideChannel, ticked: threading.Semaphore) -> Watchdog:
    def tick() -> tuple[int, ...]:
        ticked.release()
        return ()

    actions = WatchdogActions(
        cut=lambda: None,
        interrupt=lambda: None,
        signals_received=tick,
        exit_status_of=lambda _: None,
        launcher_pid=None,
        claim_file=lambda _: False,
    )
    progress = Progress(waiting_in=(__file__,))
    return Watchdog(HeartbeatMonitor(channel, progress, warn_after_s=600, timeout_s=1800), actions)


def test_a_rank_that_does_not_listen_blames_whom_others_blame() -> None:
    ticked = threading.Semaphore(0)
    channel = SideChannel(HashStore(), name="run", rank=0, world_size=2)
    watchdog = watchdog_of(channel, ticked)
    watchdog.start()
    ticked.acquire()
    watchdog.monitor.wait.listens = False
    blamed = Failure(rank=1, kind=Kind.STALLED, what="it no longer answers")
    threading.Timer(0.3, channel.report, [blamed]).start()
    assert watchdog.end_by(RuntimeError("gloo: timed out")) == blamed
    watchdog.stop()


def test_few_of_the_ranks_that_wait_listen_to_all_before_a_time_out(
    channels: Callable[..., list[SideChannel]],
) -> None:
    listening = []
    for channel in channels(20, store=HashStore()):
        progress = Progress(waiting_in=(__file__,))
        progress.follow_this_thread()
        progress.since -= 10
        monitor = HeartbeatMonitor(channel, progress, warn_after_s=0.1, timeout_s=1)
        monitor.beat()
        assert monitor.find_failure() is None
        listening.append(monitor.wait.listens)
    assert listening == [True] * 4 + [False] * 16


def test_heartbeats_of_all_ranks_are_read_at_once(channels: Callable[..., list[SideChannel]]) -> None:
    store = CountedStore()
    ranks = channels(20, store=store)
    for channel in ranks[:-1]:
        channel.set(f"beat/{channel.rank}", {"count": channel.rank})
    missing_one = {rank: {"count": rank} for rank in range(1, 19)}
    assert ranks[0].get_of_others("beat") == missing_one
    ranks[-1].set("beat/19", {"count": 19})
    store.asked.clear()
    assert ranks[0].get_of_others("beat") == {**missing_one, 19: {"count": 19}}
    assert store.asked.total() == 2
