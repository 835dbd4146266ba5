"""Fits that cannot share processes: memory is measured with FSDP, and `torch.compile` keeps what it has compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import TracebackType

from benchmarks.fits import MainThreadFit, Measured
from benchmarks.loop import LoopSettings
from benchmarks.ranks import Place, RankFailed, Ranks

# A place, and a variant there.
Key = tuple[str, str]


class OwnProcesses:
    """Variants in processes of their own. They start and compile at the same time, and then train in turns.

    A variant that fails is left out from then on, with a line on the terminal: the others go on. Its processes end with
    the others, because one that is killed can take those along that share a GPU with it.

    Args:
        settings: of all of them.
        places: where the ranks of a variant run, by a name for it. Each variant trains in each place.
    """

    def __init__(self, settings: LoopSettings, places: Mapping[str, Place]) -> None:
        self._settings = settings
        self._variants = {variant.name: variant for variant in settings.variants}
        self._ranks = {
            (at, name): Ranks(MainThreadFit, replace(settings, variants=(variant,)), place)
            for at, place in places.items()
            for name, variant in self._variants.items()
        }
        self._settled: set[Key] = set()
        self._failed: set[Key] = set()

    def __enter__(self) -> OwnProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with ThreadPoolExecutor(len(self._ranks)) as pool:
            list(pool.map(lambda ranks: ranks.__exit__(None, None, None), self._ranks.values()))

    def first_steps(self) -> dict[Key, float]:
        """Make the first step of all, at the same time; return the seconds until each was made."""
        began = time.monotonic()

        def step(key: Key) -> float:
            seconds = float("nan") if self._call(key, 0, 1) is None else time.monotonic() - began
            print(f"{' '.join(key)}: first step after {seconds:.0f} s", flush=True)
            return seconds

        with ThreadPoolExecutor(len(self._ranks)) as pool:
            return dict(zip(self._ranks, pool.map(step, self._ranks), strict=True))

    def turns(self, at: str) -> dict[str, Callable[[], Measured | None]]:
        """What each variant of a place does when it is its turn, by name. None: it has failed."""
        return {name: partial(self._turn, (place, name)) for place, name in self._ranks if place == at}

    def _turn(self, key: Key) -> Measured | None:
        # After the first turn, what others have driven out of the caches comes back in a step that is not measured.
        num_unmeasured = 1 if key in self._settled else self._variants[key[1]].steps_to_settle
        self._settled.add(key)
        measured = self._call(key, num_unmeasured, self._settings.steps)
        return measured and replace(measured, seconds=measured.seconds / self._settings.steps)

    def _call(self, key: Key, num_unmeasured: int, num_measured: int) -> Measured | None:
        if key in self._failed:
            return None
        try:
            found: list[Measured] = self._ranks[key].call("turn", num_unmeasured, num_measured)
        except RankFailed as error:
            self._failed.add(key)
            print(f"{' '.join(key)}: {error}", flush=True)
            return None
        return Measured(max(one.seconds for one in found), max(one.peak for one in found))


def without_failed(rounds: Mapping[str, Sequence[Measured | None]]) -> dict[str, list[Measured]]:
    """The turns of variants that have not failed."""
    return {name: [turn for turn in turns if turn is not None] for name, turns in rounds.items() if None not in turns}
