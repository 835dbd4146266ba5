"""Ending the thread that trains, and which rank saves then.

Note: ways to end
    A rank that has to end does so, in this order: at its next collective, which fails; at the beginning of its next
    phase; by an exception that a signal raises wherever its program is; by leaving the process at once. The last two
    spare a rank that is writing a checkpoint or in the middle of an optimizer's step.

Note: one saver
    At most one rank saves. Each rank that ends waits for the lower ones, as long as they may come, and then claims to
    be the saver; the store keeps the first claim. If the store has died with rank zero, whoever makes a file first is
    the saver, in the directory of the checkpoints. The rank whose exception ends the run saves only if it is rank zero:
    it may be in the middle of a step (docs/design/saver.md).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable

from lightning_bucketddp.faults.failure import Failure, Kind
from lightning_bucketddp.faults.local_ranks import LocalRanks, StoreAccess
from lightning_bucketddp.faults.progress import Progress
from lightning_bucketddp.faults.side_channel import SideChannel

_INTERRUPT_AFTER_S = 1.0
_EXIT_AFTER_S = 2.5


class Shutdown:
    """Ends the thread that trains, with more and more force (Note: ways to end).

    `cut` and `interrupt` are those of `WatchdogActions`. Once the thread has raised, callbacks may take `timeout_s`.
    """

    def __init__(
        self, progress: Progress, *, cut: Callable[[], None], interrupt: Callable[[], None], rank: int, timeout_s: float
    ) -> None:
        self._progress = progress
        self._cut = cut
        self._interrupt = interrupt
        self._rank = rank
        self._timeout_s = timeout_s
        self.has_aborted = False  # this rank no longer waits for others
        # When the thread has raised, and since when it could have; None: neither.
        self._ending_at: float | None = None
        self._pressed_at: float | None = None

    @property
    def is_ending(self) -> bool:
        """Return whether the thread has raised, and only callbacks run still."""
        return self._ending_at is not None

    @property
    def ending_for_s(self) -> float:
        """Return how long ago the thread has raised; 0 if it has not."""
        return 0.0 if self._ending_at is None else time.monotonic() - self._ending_at

    def begin_ending(self) -> None:
        """Remember that the thread has raised."""
        self._ending_at = time.monotonic()

    def abort(self, failure: Failure) -> None:
        """End every collective, and have the thread end."""
        if not self.has_aborted:
            if self._ending_at is None:
                self._progress.end_with = lambda: failure.error_for(self._rank)
            self._cut()
            self.has_aborted = True

    def press(self, failure: Failure) -> None:
        """Make the thread end, with the next means if it has had its time."""
        now = time.monotonic()
        if not self.has_aborted:
            return  # all have raised together: what the program does then is its own affair
        if self._ending_at is not None:
            if now - self._ending_at > self._timeout_s:
                self._exit(failure, why="its callbacks take too long")
        elif not self._progress.may_be_interrupted:
            self._pressed_at = None
        else:
            self._pressed_at = now if self._pressed_at is None else self._pressed_at
            if now - self._pressed_at > _EXIT_AFTER_S:
                self._exit(failure, why="it cannot be interrupted")
            elif now - self._pressed_at > _INTERRUPT_AFTER_S:
                self._interrupt()

    def _exit(self, failure: Failure, *, why: str) -> None:
        sys.stderr.write(
            f"bucketddp: rank {self._rank} exits at once in {self._progress.describe()}, because {why}."
            f" {failure.describe()}\nThe stack of rank {self._rank}, innermost call last:\n{self._progress.stack()}"
        )
        sys.stderr.flush()
        for child in multiprocessing.active_children():
            child.kill()  # data workers, which might wait for us for ever
        os._exit(1)


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
