"""How long checkpoints took, as plain numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class CheckpointStats:
    """Seconds on rank zero; the other ranks wait for it.

    Attributes:
        num_saves: checkpoints saved, or tried to.
        snapshot_s: copying them, for those that are written in the background.
        waiting_s: waiting for the one before to be written in the background.
        writing_s: writing them while training waited.
        background_s: writing them while training went on.
    """

    num_saves: int = 0
    snapshot_s: float = 0.0
    waiting_s: float = 0.0
    writing_s: float = 0.0
    background_s: float = 0.0

    @property
    def held_up_s(self) -> float:
        """How long training stood still for them."""
        return self.snapshot_s + self.waiting_s + self.writing_s

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Add the time spent inside to the attribute `name`, however it ends."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    def describe(self) -> str:
        """All of it in one line."""
        return (
            f"{self.num_saves} checkpoint{'' if self.num_saves == 1 else 's'}, held up training for"
            f" {self.held_up_s:.3f} s (snapshot {self.snapshot_s:.3f} s, waiting {self.waiting_s:.3f} s, writing"
            f" {self.writing_s:.3f} s), wrote for {self.background_s:.3f} s in the background"
        )
