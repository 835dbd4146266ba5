"""Ending the thread that trains (docs/design/failure-protocol.md), and which rank saves then.

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
from lightning_bucketddp.faults.local_ranks import GuardedStore
from lightning_bucketddp.faults.progress import Progress

_INTERRUPT_AFTER_S = 1.0
_EXIT_AFTER_S = 2.5
# Longer than a rank that hangs may take to end.
_COMES_WITHIN_S = 5.0
_LOOKS_EVERY_S = 0.05


class Shutdown:
    """Ends the thread that trains, with more and more force.

    It ends, in this order: at its next collective, which fails; at the beginning of its next phase; by an exception
    that a signal raises wherever its program is; by leaving the process at once. The last two spare a rank that is
    writing a checkpoint or in the middle of an optimizer's step. Callbacks may take `timeout_s`.
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
        # When the thread has raised, so that only callbacks run still, and since when it could have; None: neither.
        self.raised_at: float | None = None
        self._pressed_at: float | None = None

    def abort(self, failure: Failure) -> None:
        """End every collective, and have the thread end."""
        if not self.has_aborted:
            if self.raised_at is None:
                self._progress.end_with = lambda: failure.error_for(self._rank)
            self.has_aborted = True  # before, because a device may take its time
            self._cut()

    def press(self, failure: Failure) -> None:
        """Make the thread end, with the next means if it has had its time."""
        now = time.monotonic()
        if not self.has_aborted:
            return  # all have raised together: what the program does then is its own affair
        if self.raised_at is not None:
            if now - self.raised_at > self._timeout_s:
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


class SaverElection:
    """Finds the rank that saves for all (Note: one saver).

    `claim_file` returns whether this rank is the first to make a file for this run.
    """

    def __init__(self, store: GuardedStore, *, claim_file: Callable[[str], bool]) -> None:
        self._store = store
        self._channel = store.channel
        self._local_ranks = store.local_ranks
        self._claim_file = claim_file
        self.is_own: bool | None = None  # whether the saver is this rank; None: not known yet

    def look(self) -> None:
        """Check whether a rank is the saver by now."""
        if self.is_own is None and (saver := self._channel.get("saver", int)) is not None:
            self.is_own = saver == self._channel.rank

    def is_won(self, failure: Failure) -> bool:
        """Return whether this rank, which ends after `failure`, is the saver. May wait for ranks that are lower."""
        rank = self._channel.rank
        if failure.kind is Kind.RAISED and failure.rank == rank != 0:
            return False
        deadline = time.monotonic() + _COMES_WITHIN_S
        while self.is_own is None and time.monotonic() < deadline and self._may_lower_rank_come(failure):
            time.sleep(self._channel.interval(_LOOKS_EVERY_S))
            self._store.ask(self.look)
        if self.is_own is None:
            saver = self._store.ask(lambda: self._channel.first("saver", rank))
            # On the other side of a network that is cut, ranks may find the store gone, and save as well.
            needs_file = saver is None or (saver == rank and failure.kind is Kind.LOST)
            self.is_own = self._claim_file(self._channel.run_id) if needs_file else saver == rank
        return self.is_own

    def _may_lower_rank_come(self, failure: Failure) -> bool:
        lower = set(range(self._channel.rank)).difference(self._local_ranks.gone())
        if failure.kind in (Kind.DIED, Kind.LOST):
            lower.discard(failure.rank)
        if not self._store.can_ask:
            lower.intersection_update(self._local_ranks.numbers())  # of others nobody can hear
        return bool(lower)
