"""Heartbeats: noticing that ranks wait for one that does not come, which one that is, and what it does."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_bucketddp.comm.connections import SILENT_AFTER_S, Connections
from lightning_bucketddp.faults.failure import Failure, Kind, this_process
from lightning_bucketddp.faults.local_ranks import StoreAccess
from lightning_bucketddp.faults.progress import Progress
from lightning_bucketddp.faults.side_channel import SideChannel

log = logging.getLogger(__name__)

_BEAT_EVERY_S = 1.0
# In intervals between two heartbeats: so long that a rank that lives has sent another one.
_SILENCE = 2.5
# So long before the time-out, and the silence, the ranks are listened to for the first time, so that their silence
# shows by then. That a rank waits is noticed a moment after it has begun to.
_LISTEN_BEFORE_S = 1.5
# So many ranks listen to all others before a time-out, for all that wait.
NUM_LISTENERS = 4
_NUM_NAMED = 4
# A rank that is heard no more may only be in a library that keeps Python's lock: it has stood still after this.
_STANDS_STILL_S = 10.0
# The end of a collective may reach one rank so much later than another.
_ELSEWHERE_S = 4.0
_STOPPED = "its process is stopped (by SIGSTOP or a debugger) and cannot be asked for its stack"


@dataclass(frozen=True, slots=True)
class _Heartbeats:
    """The newest heartbeats of the other ranks, and when they were asked for."""

    at: float
    by_rank: dict[int, dict[str, Any]]


class StragglerDetector:
    """Sends this rank's heartbeats, and reports, once per wait, the stragglers for which it has waited too long.

    `addresses` are those of this host.
    """

    def __init__(
        self,
        channel: SideChannel,
        progress: Progress,
        *,
        warn_after_s: float,
        timeout_s: float,
        stall_timeout_s: float = math.inf,
        addresses: Sequence[str] = (),
    ) -> None:
        self._channel = channel
        self._progress = progress
        self._warn_after_s = warn_after_s
        self._timeout_s = timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._addresses = addresses
        self._beat_every_s = channel.interval(_BEAT_EVERY_S)
        self._silence_s = _SILENCE * self._beat_every_s
        self._num_beats = 0
        self._last_beat_at = 0.0
        self._waits_in_phase = -1
        self._waits_since = 0.0
        self._has_warned = False
        # What was heard of the others shortly before the time-out; None while that is far.
        self._heard: _Heartbeats | None = None
        # Otherwise enough other ranks that wait listen to all.
        self.listens = True
        # When this rank looks for one that stands still; and the last heartbeats of all, since when.
        self._looks_at = math.inf
        self._last_heard: dict[int, tuple[int, float]] = {}
        # What this rank has asked for last, and whether it is one of those that ask.
        self._asked: dict[str, bool] = {}

    def beat(self) -> None:
        """Send a heartbeat, if it is time to."""
        now = time.monotonic()
        if now - self._last_beat_at < self._beat_every_s:
            return
        self._last_beat_at = now
        self._num_beats += 1
        here = self._progress
        is_slow = here.seconds > min(self._warn_after_s, self._silence_s)
        self._channel.beat(
            {
                "count": self._num_beats,
                "where": here.describe(),
                "seconds": here.seconds,
                "waits": here.is_waiting,
                "process": this_process(),
                "addresses": list(self._addresses),
                "stack": here.stack() if is_slow else "",
            }
        )

    def waits_too_long(self) -> bool:
        """Return whether it is time for a warning: this rank has waited in one phase all the while."""
        now = time.monotonic()
        here = self._progress
        if not here.is_waiting or here.num_phases != self._waits_in_phase:
            self._waits_in_phase = here.num_phases if here.is_waiting else -1
            self._waits_since = now
            self._has_warned = False
            self._heard = None
            self.listens = True
            self._looks_at = now + self._stall_timeout_s
            self._last_heard = {}
            return False
        return not self._has_warned and now - self._waits_since > self._warn_after_s

    def nears_timeout(self) -> bool:
        """Return whether it is time to `anticipate_timeout`."""
        is_near = time.monotonic() - self._waits_since > self._timeout_s - self._silence_s - _LISTEN_BEFORE_S
        return self._waits_in_phase != -1 and is_near and self._heard is None and self.listens

    def anticipate_timeout(self) -> None:
        """Listen to the others shortly before the time-out, so that it is known then who has fallen silent."""
        self.listens = self._channel.is_among_first(NUM_LISTENERS, f"listen in {self._progress.describe()}")
        if self.listens:
            self._heard = self._listen()

    @property
    def looks_for_stall(self) -> bool:
        """Return whether it is time to `find_stalled`."""
        return self._waits_in_phase != -1 and time.monotonic() > self._looks_at

    def find_stalled(self, frozen: Sequence[int], *, can_ask: bool) -> Failure | None:
        """Return a rank that has stood still for `stall_timeout_s`, as long as this one has waited; None: none has.

        A rank that goes from phase to phase does not stand still, nor one that waits, too.
        """
        now = time.monotonic()
        if not can_ask:
            return next(iter(self.find_stragglers(frozen, can_ask=False)), None)
        if not self._last_heard and not self._channel.is_among_first(
            NUM_LISTENERS, f"stall in {self._progress.describe()}"
        ):
            self._looks_at = math.inf
            return None
        self._looks_at = now + self._beat_every_s
        beats = self._listen().by_rank
        for rank, beat in beats.items():
            if self._last_heard.get(rank, (0, now))[0] != beat["count"]:
                self._last_heard[rank] = beat["count"], now
            if now - self._last_heard[rank][1] > max(self._silence_s, min(self._stall_timeout_s, _STANDS_STILL_S)):
                return _silent(rank, beat, _STOPPED if rank in frozen else "it no longer answers")
            if not beat["waits"] and beat["seconds"] > self._stall_timeout_s:
                return _behind(rank, beat, f"it has been there for {beat['seconds']:.0f} s")
        return None

    def find_lost(self, hosts: Collection[str], why: str, *, has_broken: bool) -> Failure | None:
        """Return the loss of a rank whose host is one of `hosts`, preferably of one that is heard no more.

        If a connection `has_broken`, of any rank that is heard no more. None: there is none, and `hosts` are strangers.
        """
        beats, silent = self._listen_for_silence(self._listen())
        there = {rank: sorted(set(hosts) & set(beat["addresses"])) for rank, beat in beats.items()}
        for rank in sorted(beats, key=lambda rank: (not there[rank], rank not in silent)):
            between = there[rank]
            if rank in silent and (there[rank] or has_broken):
                what = f"{why}; it was last heard of in {beats[rank]['where']}"
            elif there[rank]:
                what = f"{why}, although it lives: it and rank {self._channel.rank} do not reach each other"
                between = [*between, *self._addresses]
            else:
                continue
            process = beats[rank]["process"]
            return Failure(rank=rank, kind=Kind.LOST, what=what, process=process, hosts=" ".join(between))
        return None

    def waiting_elsewhere(self, what: str, *, phase: str) -> list[int]:
        """Return the ranks that are not in `phase`, like this one, if they all wait: then none of them comes there.

        Enough ranks ask, and no more, of those that do so for the same reason, which is `what`.
        """
        if what not in self._asked:
            self._asked = {what: self._channel.is_among_first(NUM_LISTENERS, what)}
        if not self._asked[what]:
            return []
        elsewhere = {r: b for r, b in self._listen().by_rank.items() if not b["where"].startswith(phase)}
        wait = all(beat["waits"] and beat["seconds"] > _ELSEWHERE_S for beat in elsewhere.values())
        return sorted(elsewhere) if wait else []

    def warn(self, frozen: Sequence[int], *, can_ask: bool) -> None:
        """Log which ranks this one waits for, unless another rank that waits has done so already."""
        self._has_warned = True
        where = self._progress.describe()
        if can_ask and not self._channel.claim(f"warned of {where}"):
            return
        stragglers = self.find_stragglers(frozen, can_ask=can_ask)
        told = "\n".join(rank.describe() for rank in stragglers[:_NUM_NAMED]) or "No rank is known to be behind."
        num_more = len(stragglers) - _NUM_NAMED
        more = f"\n{num_more} more ranks are behind." if num_more > 0 else ""
        log.warning(
            "bucketddp: rank %d has waited %.0f s for other ranks in %s.\n%s%s",
            *(self._channel.rank, time.monotonic() - self._waits_since, where, told, more),
        )

    def find_stragglers(self, frozen: Sequence[int], *, can_ask: bool) -> list[Failure]:
        """Return the ranks that do not wait: those that cannot answer, and then those that do something else.

        `frozen` are the ranks on this host whose processes are stopped; with `can_ask` the store answers.
        """
        if not can_ask:
            return [Failure(rank=rank, kind=Kind.STALLED, what=_STOPPED) for rank in frozen]
        beats, silent = self._listen_for_silence(self._heard or self._listen())
        behind = [_silent(r, beats[r], _STOPPED if r in frozen else "it no longer answers") for r in silent]
        behind += [
            _behind(r, b, f"it has been there for {b['seconds']:.0f} s")
            for r, b in beats.items()
            if not b["waits"] and r not in silent
        ]
        # Or else all of them wait, each in a collective that not all of them call.
        return behind or [_behind(r, b, "it waits, too, but in another collective") for r, b in beats.items()]

    def _listen_for_silence(self, before: _Heartbeats) -> tuple[dict[int, dict[str, Any]], list[int]]:
        """Return the newest heartbeats, and the ranks that have sent none since `before`, long enough ago to tell."""
        while (left_s := before.at + self._silence_s - time.monotonic()) > 0:
            self.beat()  # others may listen, too
            time.sleep(min(left_s, self._beat_every_s / 2))
        beats = self._listen().by_rank
        return beats, [rank for rank, beat in beats.items() if before.by_rank.get(rank, beat)["count"] == beat["count"]]

    def _listen(self) -> _Heartbeats:
        beats = {rank: beat for rank, beat in self._channel.last_beats().items() if _is_heartbeat(beat)}
        return _Heartbeats(time.monotonic(), beats)


def _is_heartbeat(beat: dict[str, Any]) -> bool:
    """Return whether a rank has written `beat` (Note: untrusted input, in `side_channel`)."""
    texts = (beat.get(name) for name in ("where", "process", "stack"))
    are_numbers = isinstance(beat.get("seconds"), int | float) and type(beat.get("count")) is int
    return are_numbers and "waits" in beat and all(isinstance(text, str) for text in texts)


def _behind(rank: int, beat: dict[str, Any], what: str) -> Failure:
    place = {key: beat[key] for key in ("where", "process", "stack")}
    return Failure(rank=rank, kind=Kind.STALLED, what=what, **place)


def _silent(rank: int, beat: dict[str, Any], what: str) -> Failure:
    what = f"{what}; it was last heard of in {beat['where']}"
    hosts = " ".join(beat["addresses"])
    return Failure(rank=rank, kind=Kind.STALLED, what=what, process=beat["process"], hosts=hosts)


# Those that listen to all ranks have listened, and reported whom they blame, within this after a time-out.
_BLAMED_WITHIN_S = 3.0
_LOOKS_EVERY_S = 0.2
# A rank that has been in one phase for so long looks whether the hosts of the others still answer.
_LOOKS_AT_HOSTS_AFTER_S = 2.0
# The address at the other end of a connection, in gloo's messages.
_PEER = re.compile(r"\[(?:::ffff:)?([0-9a-fA-F.:]+)\]:\d+")


class CulpritFinder:
    """Finds the rank to blame: a straggler, one that stands still, or one whose host is gone.

    Args:
        timeout_s: how long a collective may take.
        stall_timeout_s: how long a rank may stand still while others wait for it.
    """

    def __init__(
        self,
        channel: SideChannel,
        progress: Progress,
        stragglers: StragglerDetector,
        store: StoreAccess,
        connections: Connections,
        *,
        timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        self._channel = channel
        self._progress = progress
        self._stragglers = stragglers
        self._store = store
        self._connections = connections
        self._timeout_s = timeout_s
        self._stall_timeout_s = stall_timeout_s
        # Hosts that no longer answer, of no rank: the user's.
        self._strangers: frozenset[str] = frozenset()

    def look(self) -> Failure | None:
        """Warn of stragglers that this rank waits for; return the failure of one that it shall not wait for."""
        if self._stragglers.waits_too_long():
            self._store.ask_or_do_without(self._stragglers.warn)
        if self._stragglers.nears_timeout():
            self._store.ask(self._stragglers.anticipate_timeout)
        found = self._find_stalled() if self._stragglers.looks_for_stall else None
        return found or self._find_lost()

    def blame(self, own: Failure) -> Failure:
        """Return the failure behind this rank's `own`, if that is a time-out or a broken connection."""
        failure = self._find_straggler(own) if own.kind is Kind.STALLED else own
        if failure.kind is Kind.LOST and failure.rank == self._channel.rank:
            lost = self._name_lost(_PEER.findall(failure.what), "its connection broke", has_broken=True)
            failure = lost or replace(failure, kind=Kind.RAISED)
        return failure

    def _find_straggler(self, own: Failure) -> Failure:
        """Return the failure of the straggler for which this rank has waited until the time-out, or else its own."""
        stragglers = []
        if self._stragglers.listens:
            stragglers = self._store.ask_or_do_without(self._stragglers.find_stragglers)
        elif (blamed := self._store.ask(self._await_failure)) is not None:
            return blamed
        if not stragglers:
            return own
        waited = f"the others have waited for the time-out of {self._timeout_s:g} s"
        return replace(stragglers[0], what=f"{stragglers[0].what}; {waited}")

    def _find_stalled(self) -> Failure | None:
        stalled = self._store.ask_or_do_without(self._stragglers.find_stalled)
        waited = f"the others have waited for longer than `stall_s`, {self._stall_timeout_s:g} s"
        return None if stalled is None else replace(stalled, what=f"{stalled.what}; {waited}")

    def _find_lost(self) -> Failure | None:
        """Return the loss of a rank whose host no longer answers; None: there is none (or nobody is waited for)."""
        if self._progress.seconds < _LOOKS_AT_HOSTS_AFTER_S:
            return None
        self._connections.look(every_s=self._channel.interval(1.0))
        hosts = self._connections.silent_hosts - self._strangers
        if not hosts:
            return None
        why = f"its host has not answered for {SILENT_AFTER_S:.0f} s"
        lost = self._name_lost(hosts, why, has_broken=False)
        self._strangers |= hosts if lost is None and self._store.can_ask else set()
        return lost

    def _name_lost(self, hosts: Collection[str], why: str, *, has_broken: bool) -> Failure | None:
        """Return the loss of a rank on one of `hosts`; where the store is lost, of rank 0, which is on its host."""

        def find() -> Failure | None:
            if self._channel.is_among_first(NUM_LISTENERS, f"listen for {sorted(hosts)}"):
                return self._stragglers.find_lost(hosts, why, has_broken=has_broken)
            return self._await_failure()

        found = self._store.ask(find)
        store_host = self._connections.store_host
        if self._store.can_ask or store_host is None:
            return found
        what = (
            f"{why}, and the store there is lost to rank {self._channel.rank}, too: that host is gone, or the network"
            " between"
        )
        return Failure(rank=0, kind=Kind.LOST, what=what, hosts=store_host)

    def _await_failure(self) -> Failure | None:
        """Return the failure that those report who listen to all ranks; None if they do not in time."""
        deadline = time.monotonic() + _BLAMED_WITHIN_S
        while (failure := self._channel.failure()) is None and time.monotonic() < deadline:
            time.sleep(min(self._channel.interval(_LOOKS_EVERY_S), _BLAMED_WITHIN_S))
        return failure
