"""Finding the rank that is to blame when others only see that they wait, or that a connection broke."""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from dataclasses import replace

from lightning_bucketddp.comm.connections import SILENT_AFTER_S, Connections
from lightning_bucketddp.faults.failure import Failure, Kind
from lightning_bucketddp.faults.progress import Progress
from lightning_bucketddp.faults.side_channel import SideChannel
from lightning_bucketddp.faults.store_access import StoreAccess
from lightning_bucketddp.faults.stragglers import NUM_LISTENERS, StragglerDetector

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
