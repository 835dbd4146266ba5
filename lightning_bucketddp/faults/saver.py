"""Which rank saves for all when ranks have aborted.

Note: one saver
    At most one rank saves. Each rank that ends waits for the lower ones, as long as they may come, and then claims to
    be the saver; the store keeps the first claim. If the store has died with rank zero, whoever makes a file first is
    the saver, in the directory of the checkpoints. The rank whose exception ends the run saves only if it is rank zero:
    it may be in the middle of a step (docs/design/saver.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lightning_bucketddp.faults.failure import Failure, Kind
from lightning_bucketddp.faults.local_ranks import LocalRanks
from lightning_bucketddp.faults.side_channel import SideChannel
from lightning_bucketddp.faults.store_access import StoreAccess

# Longer than a rank that hangs may take to end (Note: ways to end).
_COMES_WITHIN_S = 5.0
_LOOKS_EVERY_S = 0.05


class SaverElection:
    """Finds the rank that saves for all (Note: one saver).

    Args:
        claim_file: returns whether this rank is the first to make a file for this run.
    """

    def __init__(
        self,
        channel: SideChannel,
        local_ranks: LocalRanks,
        store: StoreAccess,
        *,
        claim_file: Callable[[str], bool],
    ) -> None:
        self._channel = channel
        self._local_ranks = local_ranks
        self._store = store
        self._claim_file = claim_file
        self.is_settled = False
        self._is_won = False

    def look(self) -> None:
        """See whether a rank is the saver by now."""
        if not self.is_settled and (saver := self._channel.saver()) is not None:
            self._settle(is_won=saver == self._channel.rank)

    def is_won(self, failure: Failure) -> bool:
        """Return whether this rank, which ends after `failure`, is the saver. May wait for ranks that are lower."""
        if failure.kind is Kind.RAISED and failure.rank == self._channel.rank != 0:
            return False
        deadline = time.monotonic() + _COMES_WITHIN_S
        while not self.is_settled and time.monotonic() < deadline and self._may_lower_rank_come(failure):
            time.sleep(self._channel.interval(_LOOKS_EVERY_S))
            self._store.ask(self.look)
        if not self.is_settled:
            saver = self._store.ask(self._channel.claim_saver)
            # On the other side of a network that is cut, ranks may find the store gone, and save as well.
            needs_file = saver is None or (saver == self._channel.rank and failure.kind is Kind.LOST)
            is_won = self._claim_file(self._channel.run_id) if needs_file else saver == self._channel.rank
            self._settle(is_won=is_won)
        return self._is_won

    def _may_lower_rank_come(self, failure: Failure) -> bool:
        lower = set(range(self._channel.rank)).difference(self._local_ranks.gone())
        if failure.kind in (Kind.DIED, Kind.LOST):
            lower.discard(failure.rank)
        if not self._store.can_ask:
            lower.intersection_update(self._local_ranks.numbers())  # of others nobody can hear
        return bool(lower)

    def _settle(self, *, is_won: bool) -> None:
        self._is_won = is_won
        self.is_settled = True
