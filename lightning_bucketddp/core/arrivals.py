"""Which gradients a bucket waits for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Arrivals:
    """How many gradients a bucket waits for in a backward, how many of them are still to come, and whether it has left.

    One gradient per member, more for a parameter whose hook fires several times (reentrant checkpointing).
    """

    expected: int
    pending: int = 0
    launched: bool = False

    def begin(self) -> None:
        """A backward begins."""
        self.pending = self.expected
        self.launched = False

    def rest(self) -> None:
        """No backward runs: the next gradient is one to act on, because it begins another."""
        self.pending = 0
