"""Heartbeats: noticing that ranks wait for one that does not come, which one that is, and what it does."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace

from lightning_bucketddp.comm.connections import SILENT_AFTER_S
from lightning_bucketddp.faults.failure import Failure, Kind, this_process
from lightning_bucketddp.faults.progress import Progress
from lightning_bucketddp.faults.side_channel import SideChannel
from lightning_bucketddp.wording import wrap

log = logging.getLogger(__name__)

_BEAT_EVERY_S = 1.0
# In intervals between two heartbeats: a rank that lives has sent another one by then.
_SILENCE = 2.5
# Ranks listen for the first time so long before the time-out that silence shows by then.
_LISTEN_BEFORE_S = 1.5
# How many ranks listen to all others before a time-out, for all that wait.
_NUM_LISTENERS = 4
_NUM_NAMED = 4
# A rank that is silent may only be in a library that keeps the GIL: it counts as standing still after this.
_STANDS_STILL_S = 10.0
# The end of a collective may reach one rank so much later than another.
_ELSEWHERE_S = 4.0
# Ranks that listen to all others report which one they blame within this after a time-out.
_BLAMED_WITHIN_S = 3.0
_CHECK_EVERY_S = 0.2
# A rank that has been in one phase for so long checks whether the hosts of the others still answer.
_CHECKS_HOSTS_AFTER_S = 2.0
_STOPPED = "its process is stopped (by SIGSTOP or a debugger) and cannot be asked for its stack"
# The address at the other end of a connection, in gloo's messages.
_PEER = re.compile(r"\[(?:::ffff:)?([0-9a-fA-F.:]+)\]:\d+")


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a rank reports of itself every second."""

    count: int
    where: str  # its phase
    seconds: float  # since when it has been there
    waits: bool  # for other ranks
    process: str
    addresses: str  # of its host, with spaces between them
    stack: str = ""  # if it has been there for long


@dataclass(slots=True)
class Wait:
    """What belongs to one wait of this rank, and ends with the phase in which it waits."""

    phase: int  # the number of the phase; -1: this rank does not wait
    since: float
    next_check: float  # when this rank checks whether another stands still
    has_warned: bool = False
    listens: bool = True  # to all ranks; False: enough others that wait do
    # The heartbeats shortly before the time-out, and when they were read; None: not yet.
    heard: tuple[dict[int, Heartbeat], float] | None = None
    # By rank: the count in its last heartbeat, and since when it has been so.
    last_counts: dict[int, tuple[int, float]] = field(default_factory=dict)


@dataclass(eq=False)
class HeartbeatMonitor:
    """Sends this rank's heartbeats, and finds the rank that others wait for: behind, standing still, or lost."""

    channel: SideChannel
    progress: Progress
    warn_after_s: float  # how long this rank may wait for others before it warns, once per wait
    timeout_s: float  # how long a collective may take
    stall_timeout_s: float = math.inf  # how long a rank may stand still while others wait for it

    def __post_init__(self) -> None:
        self.wait = Wait(-1, 0.0, math.inf)
        self._connections = self.channel.connections
        self._beat_every_s = self.channel.interval(_BEAT_EVERY_S)
        self._silence_s = _SILENCE * self._beat_every_s
        self._num_beats = 0
        self._last_beat_at = 0.0
        # What this rank has asked for last in `waiting_elsewhere`, and whether it is one of those that ask.
        self._asked: dict[str, bool] = {}
        # Hosts that no longer answer, of no rank: the user's.
        self._foreign_hosts: frozenset[str] = frozenset()

    def beat(self) -> None:
        """Send a heartbeat, if it is time to."""
        now = time.monotonic()
        if now - self._last_beat_at < self._beat_every_s:
            return
        self._last_beat_at = now
        self._num_beats += 1
        here = self.progress
        is_slow = here.seconds > min(self.warn_after_s, self._silence_s)
        beat = Heartbeat(
            count=self._num_beats,
            where=here.describe(),
            seconds=here.seconds,
            waits=here.is_waiting,
            process=this_process(),
            addresses=" ".join(self._connections.addresses),
            stack=here.stack() if is_slow else "",
        )
        self.channel.set(f"beat/{self.channel.rank}", asdict(beat))

    def find_failure(self) -> Failure | None:
        """Warn of stragglers that this rank waits for; return the failure of one that it shall not wait for."""
        phase = self.progress.num_phases if self.progress.is_waiting else -1
        now = time.monotonic()
        if phase == -1 or phase != self.wait.phase:
            self.wait = Wait(phase, now, now + self.stall_timeout_s)
        wait = self.wait
        if wait.phase != -1:
            if now - wait.since > self.warn_after_s and not wait.has_warned:
                self._warn()
            is_near_timeout = now - wait.since > self.timeout_s - self._silence_s - _LISTEN_BEFORE_S
            if is_near_timeout and wait.heard is None and wait.listens:
                # So that it is known at the time-out who has fallen silent.
                wait.listens = self.channel.is_among_first(_NUM_LISTENERS, f"listen in {self.progress.describe()}")
                if wait.listens and (beats := self._listen()):
                    wait.heard = beats, time.monotonic()
            if now > wait.next_check:
                stalled = self._find_stalled()
                if not self.channel.can_ask:
                    stalled = next(iter(self._stopped()), None)
                if stalled is not None:
                    waited = f"the others have waited for longer than `stall_s`, {self.stall_timeout_s:g} s"
                    return replace(stalled, what=f"{stalled.what}; {waited}")
        return self._find_lost_host()

    def _find_stalled(self) -> Failure | None:
        """Return a rank that has stood still for `stall_timeout_s`, as long as this one has waited; None: none has.

        A rank that goes from phase to phase does not stand still, nor one that waits, too.
        """
        now = time.monotonic()
        counts = self.wait.last_counts
        if not counts and not self.channel.is_among_first(_NUM_LISTENERS, f"stall in {self.progress.describe()}"):
            self.wait.next_check = math.inf
            return None
        self.wait.next_check = now + self._beat_every_s
        for rank, beat in self._listen().items():
            if rank not in counts or counts[rank][0] != beat.count:
                counts[rank] = beat.count, now
            if now - counts[rank][1] > max(self._silence_s, min(self.stall_timeout_s, _STANDS_STILL_S)):
                return self._silent(rank, beat)
            if not beat.waits and beat.seconds > self.stall_timeout_s:
                return _behind(rank, beat)
        return None

    def find_stragglers(self) -> list[Failure]:
        """Return the ranks that do not wait: those that cannot answer, and then those that do something else."""
        beats, silent = self._listen_for_silence(*(self.wait.heard or (self._listen(), time.monotonic())))
        behind = [self._silent(rank, beats[rank]) for rank in silent]
        behind += [_behind(rank, beat) for rank, beat in beats.items() if not beat.waits and rank not in silent]
        # If all of them wait, each does so in a collective that not all of them call.
        return behind or [_behind(rank, beat) for rank, beat in beats.items()] or self._stopped()

    def waiting_elsewhere(self, what: str, *, phase: str) -> list[int]:
        """Return the ranks that are not in `phase`, like this one, if they all wait: then none of them comes there.

        Only the first few ranks that ask for the reason `what` get an answer.
        """
        if what not in self._asked:
            self._asked = {what: self.channel.is_among_first(_NUM_LISTENERS, what)}
        if not self._asked[what]:
            return []
        elsewhere = {rank: beat for rank, beat in self._listen().items() if not beat.where.startswith(phase)}
        wait = all(beat.waits and beat.seconds > _ELSEWHERE_S for beat in elsewhere.values())
        return sorted(elsewhere) if wait else []

    def blame(self, own: Failure) -> Failure:
        """Return the failure behind this rank's `own`, if that is a time-out or a broken connection."""
        failure = own
        if own.kind is Kind.STALLED:
            if not self.wait.listens:
                failure = self._await_failure() or own
            elif stragglers := self.find_stragglers():
                waited = f"the others have waited for the time-out of {self.timeout_s:g} s"
                failure = replace(stragglers[0], what=f"{stragglers[0].what}; {waited}")
        if failure.kind is Kind.LOST and failure.rank == self.channel.rank:
            lost = self._name_lost(_PEER.findall(failure.what), "its connection broke", has_broken=True)
            failure = lost or replace(failure, kind=Kind.RAISED)
        return failure

    def _warn(self) -> None:
        """Log which ranks this one waits for, unless another rank that waits has done so already."""
        self.wait.has_warned = True
        where, rank = self.progress.describe(), self.channel.rank
        if self.channel.first(f"warned of {where}", rank) not in (rank, None):
            return
        stragglers = self.find_stragglers()
        named = "\n".join(map(Failure.describe, stragglers[:_NUM_NAMED])) or "No rank is known to be behind."
        num_more = len(stragglers) - _NUM_NAMED
        more = f"\n{num_more} more ranks are behind." if num_more > 0 else ""
        waited = f"rank {rank} has waited {time.monotonic() - self.wait.since:.0f} s for other ranks in {where}."
        log.warning(wrap(f"bucketddp: {waited}\n{named}{more}"))

    def _find_lost_host(self) -> Failure | None:
        """Return the loss of a rank whose host no longer answers; None: there is none, or this rank does not wait."""
        if self.progress.seconds < _CHECKS_HOSTS_AFTER_S:
            return None
        self._connections.check(every_s=self.channel.interval(1.0))
        hosts = self._connections.silent_hosts - self._foreign_hosts
        if not hosts:
            return None
        lost = self._name_lost(hosts, f"its host has not answered for {SILENT_AFTER_S:.0f} s", has_broken=False)
        self._foreign_hosts |= hosts if lost is None and self.channel.can_ask else set()
        return lost

    def _name_lost(self, hosts: Collection[str], why: str, *, has_broken: bool) -> Failure | None:
        """Return the loss of a rank on one of `hosts`; where the store is lost, of rank 0, which is on its host."""
        if self.channel.is_among_first(_NUM_LISTENERS, f"listen for {sorted(hosts)}"):
            found = self._find_lost(hosts, why, has_broken=has_broken)
        else:
            found = self._await_failure()
        store_host = self._connections.store_host
        if self.channel.can_ask or store_host is None:
            return found
        what = (
            f"{why}, and the store there is lost to rank {self.channel.rank}, too: that host is gone, or the network"
            " between"
        )
        return Failure(rank=0, kind=Kind.LOST, what=what, hosts=store_host)

    def _find_lost(self, hosts: Collection[str], why: str, *, has_broken: bool) -> Failure | None:
        """Return the loss of a rank on one of `hosts`, preferably a silent one; None if `hosts` are no rank's.

        If a connection `has_broken`, any rank that is silent is taken for lost.
        """
        beats, silent = self._listen_for_silence(self._listen(), time.monotonic())
        there = {rank: sorted(set(hosts).intersection(beat.addresses.split())) for rank, beat in beats.items()}
        for rank in sorted(beats, key=lambda rank: (not there[rank], rank not in silent)):
            between = there[rank]
            if rank in silent and (there[rank] or has_broken):
                what = f"{why}; it was last heard of in {beats[rank].where}"
            elif there[rank]:
                what = f"{why}, although it lives: it and rank {self.channel.rank} do not reach each other"
                between = [*between, *self._connections.addresses]
            else:
                continue
            process = beats[rank].process
            return Failure(rank=rank, kind=Kind.LOST, what=what, process=process, hosts=" ".join(between))
        return None

    def _await_failure(self) -> Failure | None:
        """Return the failure that the listening ranks report; None if they do not in time."""
        deadline = time.monotonic() + _BLAMED_WITHIN_S
        while (failure := self.channel.failure()) is None and time.monotonic() < deadline and self.channel.can_ask:
            time.sleep(min(self.channel.interval(_CHECK_EVERY_S), _BLAMED_WITHIN_S))
        return failure

    def _listen_for_silence(
        self, before: dict[int, Heartbeat], read_at: float
    ) -> tuple[dict[int, Heartbeat], list[int]]:
        """Wait for the next heartbeats; return the newest ones, and the ranks that have sent none since `before`."""
        while (left_s := read_at + self._silence_s - time.monotonic()) > 0 and self.channel.can_ask:
            self.beat()  # others may listen, too
            time.sleep(min(left_s, self._beat_every_s / 2))
        beats = self._listen()
        return beats, [rank for rank, beat in beats.items() if rank in before and before[rank].count == beat.count]

    def _stopped(self) -> list[Failure]:
        """Return the ranks whose processes are known to be stopped, also without the store."""
        return [Failure(rank=rank, kind=Kind.STALLED, what=_STOPPED) for rank in self.channel.frozen_ranks()]

    def _silent(self, rank: int, beat: Heartbeat) -> Failure:
        what = _STOPPED if rank in self.channel.frozen_ranks() else "it no longer answers"
        what = f"{what}; it was last heard of in {beat.where}"
        return Failure(rank=rank, kind=Kind.STALLED, what=what, process=beat.process, hosts=beat.addresses)

    def _listen(self) -> dict[int, Heartbeat]:
        """Return the newest heartbeats of the other ranks, by rank, without those that have sent none."""
        return {rank: Heartbeat(**beat) for rank, beat in self.channel.get_of_others("beat").items()}


def _behind(rank: int, beat: Heartbeat) -> Failure:
    is_there = f"it has been there for {beat.seconds:.0f} s"
    what = "it waits, too, but in another collective" if beat.waits else is_there
    return Failure(rank=rank, kind=Kind.STALLED, what=what, where=beat.where, process=beat.process, stack=beat.stack)
