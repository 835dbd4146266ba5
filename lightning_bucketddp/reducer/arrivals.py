"""Which gradients a bucket waits for."""

from __future__ import annotations

from dataclasses import dataclass


class LateGradientError(RuntimeError):
    """A gradient arrived after its bucket had left."""


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


def late_gradient(name: str, *, bucket: int, rank: int) -> LateGradientError:
    """What to raise for the gradient of parameter `name`."""
    return LateGradientError(
        f"Gradient of `{name}` arrived after its bucket {bucket} had left (rank {rank}). The parameter is used more"
        " often in this backward than in the first one. Pass `overlap=False` to the strategy if that is intended."
    )
