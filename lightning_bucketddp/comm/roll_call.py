"""Waiting for all ranks outside of collectives: one that does not come may be in any other collective.

Two ranks in different collectives of a group take each other's messages for their own, which ends a process of gloo.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from lightning_bucketddp.comm.process_group import StoreAccess, access_store

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.2
# Thousands of ranks ask less often, so that together they ask no more than the store can answer.
_PER_RANK_S = 0.0005


class RollCall:
    """Roll calls of the ranks of the process group; a rank whose object of this class is gone answers none."""

    def __init__(self, *, rank: int, world_size: int, timeout_s: float) -> None:
        self.number = 0
        self._access = access_store()
        self._store = self._access.store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._run = f"bucketddp/{self._access.name}"
        self._name = f"{self._run}/roll_calls/{self._store.add(f'{self._run}/num_roll_calls/{rank}', 1)}"
        leave = weakref.finalize(self, partial(_leave, self._access, f"{self._name}/left/{rank}"))
        # Also when the program ends, and before a process that has started others waits for their end.
        leave.atexit = False
        atexit.register(leave)

    def absent(self, *, waiting_elsewhere: Callable[[], Sequence[int]], raise_if_over: Callable[[], None]) -> list[int]:
        """Wait until all ranks answer, and return none; or return ranks that do not, as soon as that is known."""
        self.number += 1
        key = f"{self._name}/{self.number}"
        num_answers = self._add(key, 1)
        pause_s = _FIRST_PAUSE_S
        deadline = time.monotonic() + self._timeout_s
        while num_answers != self._world_size:
            raise_if_over()
            if num_answers is None:
                return [0]  # it held the store
            if pause_s >= _LONGEST_PAUSE_S and (absent := [*self._gone(), *waiting_elsewhere()]):
                return absent
            if time.monotonic() > deadline:
                raise RuntimeError(f"Rank {self._rank} timed out: it has waited {self._timeout_s:g} s for all ranks.")
            time.sleep(max(pause_s, _PER_RANK_S * self._world_size))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            num_answers = self._add(key, 0)
        return []

    def _add(self, key: str, number: int) -> int | None:
        """Add `number` in the store, and return the sum; None: the store is gone."""
        try:
            return int(self._store.add(key, number))
        except RuntimeError:
            if self._access.is_there:
                raise
            return None

    def _gone(self) -> list[int]:
        """Return ranks that have ended, or begun another run. Only rank zero asks for all; others ask for it."""

        def num_runs(rank: int) -> int:
            return int(self._store.add(f"{self._run}/num_runs/{rank}", 0))

        others = range(1, self._world_size) if self._rank == 0 else [0]
        own = num_runs(self._rank)
        return [rank for rank in others if self._store.check([f"{self._name}/left/{rank}"]) or num_runs(rank) > own]


def _leave(access: StoreAccess, key: str) -> None:
    # torch logs pages about a store that is gone.
    if access.is_there:
        with suppress(RuntimeError):
            access.store.set(key, "")
