"""The watchdog: a thread that notices when a run is over for any rank, and ends it on this one.

If all ranks raise within a moment, they have raised together: the process group is as it was, and callbacks may use it.
Otherwise they abort: each rank cuts its connections, which ends every collective, and no rank waits for another any
more. The first rank to write its decision to the store decides for all (docs/design/failure-protocol.md).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_bucketddp.faults.failure import Failure, Kind, RankFailedError, text_of
from lightning_bucketddp.faults.heartbeat import HeartbeatMonitor
from lightning_bucketddp.faults.progress import Shutdown
from lightning_bucketddp.faults.side_channel import SaverElection

log = logging.getLogger(__name__)

_TOGETHER = "together"
_ABORT = "abort"

_TICK_S = 0.2
# Until all ranks have introduced themselves: one that dies at once should be known by then.
_FIRST_TICK_S = 0.02
# How often, and how long, a rank that is done asks whether the others are. They may wait for what it does afterwards.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_DONE_WITHIN_S = 5.0
# Ranks that raise together do so within this.
_TOGETHER_WITHIN_S = 0.7
# What broke a connection is found out within this.
_CAUSE_WITHIN_S = 1.5
# Ranks that a signal stops agree on a step to end after, if they come to one within this.
_STOP_WITHIN_S = 1.5
# A terminal sends Ctrl-C to all processes, and one that waits for the ranks sends it to them again.
SAME_CTRL_C_WITHIN_S = 1.0
_SETTLED_WITHIN_S = 4.0
# Healthy ranks learn of a failure within this, also on a busy machine.
_LEARNED_WITHIN_S = 2.0


@dataclass(frozen=True)
class WatchdogActions:
    """How the watchdog learns of signals and processes, and how it ends what waits."""

    cut: Callable[[], None]  # ends every collective of this process, now and from now on
    interrupt: Callable[[], None]  # makes the training thread raise wherever it is
    # Returns the signals that shall stop the run and have come since the last call, whether or not Python has run their
    # handlers (Note: signals in a collective).
    signals_received: Callable[[], Sequence[int]]
    exit_status_of: Callable[[int], int | None]  # how the process of a rank ended, if this process has started it
    launcher_pid: int | None  # the process that has started the ranks and is none itself; they stop if it is gone
    claim_file: Callable[[str], bool]  # returns whether this process is the first to make a file for this run


@dataclass(eq=False)
class Watchdog:
    """Watches a run from its set-up to its end."""

    monitor: HeartbeatMonitor
    actions: WatchdogActions

    def __post_init__(self) -> None:
        self.channel, self.progress = self.monitor.channel, self.monitor.progress
        self.stop_signal = 0
        self.failure: Failure | None = None  # the first of the run, on whichever rank
        self.saver = SaverElection(self.channel, self.actions.claim_file)
        cut, interrupt = self.actions.cut, self.actions.interrupt
        self.shutdown = Shutdown(self.progress, cut, interrupt, self.channel.rank, self.monitor.timeout_s)
        self._decision: str | None = None
        self._to_report: Failure | None = None
        self._all_know_of_stop = False
        self._has_acknowledged = False
        self._is_done = False
        # When these things happened; None: they have not.
        self._failed_at: float | None = None
        self._stop_at: float | None = None
        self._signalled_at: float | None = None
        # A signal has come twice: the run, or its callbacks, shall no longer wait for other ranks.
        self._shall_not_wait = False
        self._callbacks_shall_not_wait = False
        self._announcement = threading.Lock()
        self._wake = threading.Event()
        self._settled = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="bucketddp-watchdog", daemon=True)

    def start(self) -> None:
        """Start the watchdog; the calling thread is the one that trains."""
        self.progress.follow_this_thread()
        self.channel.local_ranks.introduce(os.getpid())
        self._thread.start()

    def stop(self) -> None:
        """Stop the watchdog: the run is over for this rank, well or not."""
        self._is_over = True
        self._wake.set()
        # Garbage collection may end a run, in any thread.
        if threading.current_thread() is not self._thread:
            # It may be waiting for a store that no longer answers; then it ends with the process.
            self._thread.join(timeout=_SETTLED_WITHIN_S)

    def receive_signal(self, number: int) -> None:
        """Stop all ranks, because this process has received a signal. Safe to call from its handler."""
        if self._announcement.acquire(blocking=False):  # by the handler or by the watchdog, whichever comes first
            name = signal.Signals(number).name
            log.warning("bucketddp: rank %d received %s; all ranks stop.", self.channel.rank, name)
        self.request_stop(number)

    def request_stop(self, number: int) -> None:
        """Stop all ranks as by signal `number`."""
        self.stop_signal = self.stop_signal or number

    @property
    def is_ending(self) -> bool:
        """Return whether this rank has raised, and only callbacks run still, or is done."""
        return self.shutdown.raised_at is not None

    @property
    def failed_rank(self) -> int | None:
        """Return which rank has failed first; None: none has, or a signal has stopped all."""
        return None if self.failure is None or self.failure.kind is Kind.STOPPED else self.failure.rank

    def end_by(self, error: BaseException, *, stopped_by: int = 0) -> Failure:
        """End this rank by `error`, which it has raised by itself or because signal `stopped_by` stopped it.

        Waits until it is settled whether the ranks abort, and returns the first failure.
        """
        self.shutdown.raised_at = time.monotonic()
        own = Failure.of(error, rank=self.channel.rank, where=self.progress.describe_origin(error))
        if stopped_by:
            own = replace(own, kind=Kind.STOPPED, signal=stopped_by, stack="")
        is_consequence = isinstance(error, RankFailedError) or self.progress.was_waiting(error)
        text = text_of(error).lower().replace("connection timed out", "")  # that is the kernel's, of a connection
        if is_consequence and ("timed out" in text or "timeout" in text):
            own = replace(own, kind=Kind.STALLED)
        elif is_consequence:
            own = replace(own, kind=Kind.LOST)
            self._wake.set()
            self._settled.wait(_CAUSE_WITHIN_S)
        if not self._settled.is_set():
            self._to_report = own
            self._wake.set()
            # To find out who is lost, the others are listened to for a while.
            self._settled.wait(_SETTLED_WITHIN_S * (2 if own.kind is Kind.LOST else 1))
        if self.failure is None:
            # The store does not answer. At least this rank no longer waits.
            self._learn(replace(own, kind=Kind.RAISED) if own.kind is Kind.LOST else own)
            self._abort()
        assert self.failure is not None
        self.progress.end_with = None  # it is ending
        return self.failure

    def await_others(self) -> None:
        """Wait a little until all ranks have done their part, as this one has, or one has failed."""
        self.shutdown.raised_at = began_at = time.monotonic()  # nothing has to be ended here
        num_done, self._is_done, pause_s = self.channel.add("num_done"), True, _FIRST_PAUSE_S
        while num_done not in (None, self.channel.world_size) and not (self._settled.is_set() or self.stop_signal):
            if self.failure is None and time.monotonic() - began_at > _DONE_WITHIN_S:
                return
            self._settled.wait(max(pause_s, self.channel.interval(0.0)))
            num_done, pause_s = self.channel.add("num_done", 0), min(2 * pause_s, _LONGEST_PAUSE_S)

    def _run(self) -> None:
        local_ranks = self.channel.local_ranks
        is_woken, asked_at = True, 0.0
        while not self._is_over:
            # Among thousands of ranks not in every tick, but at once if something has happened here.
            asks = is_woken or time.monotonic() - asked_at >= self.channel.interval(0.0)
            try:
                self._notice_signals()
                if asks:
                    self._exchange()
                self._act()
            except Exception:
                log.exception("bucketddp: the watch of rank %d failed, and goes on", self.channel.rank)
            asked_at = time.monotonic() if asks else asked_at
            is_woken = self._wake.wait(_TICK_S if local_ranks.are_known else _FIRST_TICK_S)
            self._wake.clear()
        if self.failure is not None and self.channel.store_rank == self.channel.rank:
            self._let_others_learn()
        self.channel.set(f"left/{self.channel.rank}", 1)
        self.channel.add("num_done", not self._is_done and self.failure is None)
        self.channel.close()

    def _let_others_learn(self) -> None:
        """Wait a little until every rank knows why the run ends: with this process the store is gone."""
        deadline = time.monotonic() + self.channel.interval(0.0) + _LEARNED_WITHIN_S
        unaware = set(range(self.channel.world_size)) - {self.channel.rank}
        while unaware and time.monotonic() < deadline and self.channel.can_ask:
            unaware.difference_update(self.channel.local_ranks.gone())
            unaware = {rank for rank in unaware if self.channel.get(f"knows/{rank}") is None}
            time.sleep(_FIRST_TICK_S)

    def _notice_signals(self) -> None:
        for number in self.actions.signals_received():
            now, raised_at = time.monotonic(), self.shutdown.raised_at
            if raised_at is not None:
                # Not by the signal that ends this rank, which is noticed here a moment later.
                self._callbacks_shall_not_wait |= now - raised_at > SAME_CTRL_C_WITHIN_S
            elif self.failure is None:  # otherwise the signal is ours (`interrupt`)
                self._signalled_at = self._signalled_at or now
                self._shall_not_wait |= number == signal.SIGINT and now - self._signalled_at > SAME_CTRL_C_WITHIN_S
                self.receive_signal(number)
        if self.actions.launcher_pid not in (None, os.getppid()) and not self.stop_signal:
            log.warning("bucketddp: the process that has started rank %d is gone; all ranks stop.", self.channel.rank)
            self.request_stop(signal.SIGTERM)

    def _exchange(self) -> None:
        channel = self.channel
        self.monitor.beat()
        channel.local_ranks.discover()
        if self.failure is None and (failure_of_another := channel.failure()) is not None:
            self._learn(failure_of_another)
        if self.failure is not None:
            self._decision = self._decision or channel.get("decision")
            self.saver.check()
            if not self._has_acknowledged and (self._decision == _TOGETHER or self.saver.is_own is not None):
                channel.set(f"knows/{channel.rank}", 1)
                self._has_acknowledged = True
        if not self._all_know_of_stop:
            if (requested := channel.get("stop")) is not None:
                self.stop_signal = requested
                self._all_know_of_stop = True
            elif self.stop_signal:
                self._all_know_of_stop = channel.first("stop", self.stop_signal) is not None

    def _report(self, failure: Failure) -> None:
        """Report a failure that this rank has found to the others, unless it can be blamed on another rank."""
        if failure.rank == self.channel.rank:
            failure = self.monitor.blame(failure)
        is_own = failure.rank == self.channel.rank and failure.kind is not Kind.STALLED
        if is_own and self.channel.add("num_raised") == self.channel.world_size:
            self._decision = self.channel.first("decision", _TOGETHER)
        self._learn(self.channel.report(failure))

    def _learn(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
            self._failed_at = time.monotonic()

    def _act(self) -> None:
        """Report what has failed; then end this rank, by as much force as it needs."""
        if self._to_report is not None:
            own, self._to_report = self._to_report, None
            self._report(own)
        now = time.monotonic()
        if self.failure is None:
            if (death := self.channel.local_ranks.find_death(self.actions.exit_status_of)) is not None:
                self._report(death)
            else:
                self._stop_if_asked(now)
                if (found := self.monitor.find_failure()) is not None:
                    self._report(found)
        if self.failure is None:
            return
        assert self._failed_at is not None
        if self._decision is None and (
            self.failure.kind in (Kind.DIED, Kind.STALLED, Kind.LOST) or now - self._failed_at > _TOGETHER_WITHIN_S
        ):
            self._decision = self.channel.first("decision", _ABORT) or _ABORT
        if self._callbacks_shall_not_wait and self.progress.is_waiting:
            self._decision = _ABORT  # callbacks wait for a rank that does not come
        if self._decision == _ABORT:
            self._abort()
        if self._decision is not None:
            self._settled.set()
        self.shutdown.press(self.failure)

    def _stop_if_asked(self, now: float) -> None:
        if not self.stop_signal:
            return
        self._stop_at = self._stop_at or now
        is_time = now - self._stop_at > _STOP_WITHIN_S and self.progress.may_be_interrupted
        if (is_time or self._shall_not_wait) and not self.is_ending:
            what, where = "no step ended in time", self.progress.describe()
            rank, number = self.channel.rank, self.stop_signal
            stop = Failure(rank=rank, kind=Kind.STOPPED, what=what, where=where, signal=number)
            self._learn(self.channel.report(stop))
            self._decision = self.channel.first("decision", _ABORT) or _ABORT

    def _abort(self) -> None:
        assert self.failure is not None
        self.channel.local_ranks.kill_frozen()  # they cannot end by themselves, and what waits for them may not either
        self.shutdown.abort(self.failure)
        # No rank cuts these at their other end, or it is not noticed here.
        connections = self.channel.connections
        of_store = {connections.store_host} if self.channel.is_silent else set()
        connections.cut_to({*self.failure.hosts.split(), *of_store})
