"""Ending the thread that trains.

Note: ways to end
    A rank that has to end does so, in this order: at its next collective, which fails; at the beginning of its next
    phase; by an exception that a signal raises wherever its program is; by leaving the process at once. The last two
    spare a rank that is writing a checkpoint or in the middle of an optimizer's step.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable

from lightning_bucketddp.faults.failure import Failure
from lightning_bucketddp.faults.progress import Progress

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
