"""What the watchdogs of all ranks tell each other outside of collectives, through the store of their process group.

JSON only. The store has no password: what is no JSON, or has another shape than a rank writes, counts as not there, so
that untrusted input ends no thread of ours.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_bucketddp.faults.failure import Failure
from lightning_bucketddp.processes import Worker

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_LOOKS_EVERY_S = 0.2
# Thousands of ranks ask less often, so that together they ask no more than the store can answer.
_PER_RANK_S = 0.0005

_Value = TypeVar("_Value")


class StoreSilentError(RuntimeError):
    """The store does not answer now; it may later."""


class SideChannel:
    """Keys in the store that begin with `name`, which is that of one run: the store outlives it.

    Over a connection of its own: a thread that waits for an answer of the store keeps others waiting. And by a thread
    of its own: the process of the store may be stopped after it was asked, and then the one that asks waits for ever.
    """

    def __init__(self, store: Store, *, name: str, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        # Asked while a question waits: whether the store cannot answer. Then there is a `StoreSilentError`.
        self.is_silent: Callable[[], bool] = lambda: False
        self._store = store
        self._name = name
        self._worker = Worker("bucketddp-store", stops_at_error=False)
        self._asked_at: float | None = None

    @property
    def silent_for_s(self) -> float:
        """Return how long the store has not answered what it was asked last; 0 if it has."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    @property
    def run_id(self) -> str:
        """A name of this run, of 16 hex digits, that no other has and that is the same on all ranks."""
        # A digest, fit for the name of a file: a part of our own name is from the store (untrusted input).
        return hashlib.blake2b(self._name.encode(), digest_size=8).hexdigest()

    def interval(self, at_least: float) -> float:
        """Return the seconds between two questions of a rank that asks again and again."""
        return max(at_least, _PER_RANK_S * self.world_size)

    def close(self) -> None:
        """End the thread that asks the store, as soon as the store has answered it."""
        self._worker.close()

    def set(self, key: str, value: Any) -> None:
        self._ask(lambda: self._store.set(self._key(key), json.dumps(value)))

    def first(self, key: str, value: _Value) -> _Value | None:
        """Write `value` unless there is one; return the one that is there, None if it is of another type."""
        there = _parse(self._ask(lambda: self._store.compare_set(self._key(key), "", json.dumps(value))))
        return there if isinstance(there, type(value)) else None

    def get(self, key: str, kind: type[_Value]) -> _Value | None:
        """Return the value that is there; None if there is none, or of another type."""

        def question() -> Any:
            # Asking for a key that is not there would wait for it.
            return self._store.get(self._key(key)) if self._store.check([self._key(key)]) else b""

        value = _parse(self._ask(question))
        return value if isinstance(value, kind) else None

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter, and return the sum."""
        return int(self._ask(lambda: self._store.add(self._key(key), amount)))

    def is_among_first(self, number: int, what: str) -> bool:
        """Return whether this rank is one of the first `number` that ask this of `what`."""
        return self.add(what) <= number

    def last_beats(self) -> dict[int, dict[str, Any]]:
        """Return the newest heartbeats of the other ranks, by rank, without those that have sent none."""
        ranks = [rank for rank in range(self.world_size) if rank != self.rank]
        keys = [self._key(f"beat/{rank}") for rank in ranks]

        def question() -> list[Any]:
            if self._store.check(keys):  # two questions, however many ranks there are
                return list(self._store.multi_get(keys))
            return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]

        beats = zip(ranks, map(_parse, self._ask(question) if keys else ()), strict=True)
        return {rank: beat for rank, beat in beats if isinstance(beat, dict)}

    def report(self, failure: Failure) -> Failure:
        """Tell the others of `failure`; return the first one that any rank has reported: that one counts."""
        first = Failure.from_dict(self.first("failure", asdict(failure)))
        if first is None:  # untrusted input
            self.set("failure", asdict(failure))
        return first or failure

    def failure(self) -> Failure | None:
        return Failure.from_dict(self.get("failure", dict))

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"

    def _ask(self, question: Callable[[], Any]) -> Any:
        def timed() -> Any:
            self._asked_at = time.monotonic()
            try:
                return question()
            finally:
                self._asked_at = None

        answer = self._worker.submit(timed)
        while not wait([answer], timeout=_LOOKS_EVERY_S).done:
            if self.is_silent():
                raise StoreSilentError(f"The store does not answer rank {self.rank}.")
        return answer.result()


def _parse(raw: bytes) -> Any:
    """Return what the JSON `raw` says; None if it is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
