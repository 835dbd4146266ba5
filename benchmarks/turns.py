"""Variants that take turns: a machine that gets busy slows all of them, and only medians of one run are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Name = TypeVar("Name")
Value = TypeVar("Value")


def take_turns(
    turns: Mapping[Name, Callable[[], Value]], *, repetitions: int, seconds: float | None = None
) -> dict[Name, list[Value]]:
    """What each of `turns` returned in each round, by name.

    Args:
        turns: what a variant does when it is its turn.
        repetitions: rounds, at most.
        seconds: no round is begun that would probably end after so many of them. The first one is made in any case and
            tells nothing of the others, because all variants are built and warmed up in it.
    """
    start = time.monotonic()
    samples: dict[Name, list[Value]] = {name: [] for name in turns}
    expected = 0.0
    for repetition in range(repetitions):
        began = time.monotonic()
        if repetition > 0 and seconds is not None and began - start + expected > seconds:
            break
        for name, turn in turns.items():
            samples[name].append(turn())
        if repetition > 0:
            expected = time.monotonic() - began
    return samples
