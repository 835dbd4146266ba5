"""What the ranks tell each other outside of collectives, through the store of their process group. JSON only.

Note: untrusted input
    The store has no password. What is there and was not written by a rank, because it is no JSON or of another shape,
    counts as not there, so that no thread of ours fails by it.
"""

from __future__ import annotations

import hashlib
import json
import signal
import threading
import time
from collections.abc import Callable, Container
from concurrent.futures import Future, wait
from dataclasses import asdict
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from lightning_bucketddp.faults.failure import Failure

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_LOOKS_EVERY_S = 0.2
# Thousands of ranks ask less often, so that together they ask no more than the store can answer.
_PER_RANK_S = 0.0005


class StoreSilentError(RuntimeError):
    """The store does not answer now; it may later."""


class SideChannel:
    """Keys in the store that begin with `name`, which is that of one run: the store outlives it.

    Over a connection of its own: a thread that waits for an answer of the store keeps others waiting. And by a thread
    of its own: the process of the store may be stopped after it was asked, and then the one that asks waits for ever.

    Attributes:
        is_silent: asked while a question waits: whether the store cannot answer. If so there is a `StoreSilentError`.
    """

    def __init__(self, store: Store, *, name: str, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.is_silent: Callable[[], bool] = lambda: False
        self._store = store
        self._name = name
        self._questions = _Questions()
        threading.Thread(target=self._questions.answer, name="bucketddp-store", daemon=True).start()

    @property
    def silent_for_s(self) -> float:
        """Return how long the store has not answered what it was asked last; 0 if it has."""
        asked_at = self._questions.asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def interval(self, at_least: float) -> float:
        """Return the seconds between two questions of a rank that asks again and again."""
        return max(at_least, _PER_RANK_S * self.world_size)

    def close(self) -> None:
        """End the thread that asks the store, as soon as the store has answered it."""
        self._questions.queue.put(None)

    def introduce(self, identity: dict[str, Any], *, place: str) -> None:
        """Tell the ranks at `place`, such as a host, which process this rank is."""
        number = self._add(f"num_at/{place}")
        self._set(f"identity/{place}/{number}", {"rank": self.rank, **identity})
        self._add("num_introduced")

    def all_have_introduced_themselves(self) -> bool:
        """Return whether every rank has, wherever it is."""
        return self._add("num_introduced", 0) == self.world_size

    def identities_at(self, place: str, *, known: Container[int]) -> dict[int, dict[str, Any]]:
        """Return who has introduced itself at `place`, numbered, without those whose numbers are `known`."""
        num_there = min(self._add(f"num_at/{place}", 0), self.world_size)
        numbers = (number for number in range(1, num_there + 1) if number not in known)
        found = ((number, self._get(f"identity/{place}/{number}", dict)) for number in numbers)
        return {number: identity for number, identity in found if identity is not None}

    def report(self, failure: Failure) -> Failure:
        """Tell the others of `failure`; return the first one that any rank has reported: that one counts."""
        first = Failure.from_dict(self._set_first("failure", asdict(failure)))
        if first is None:  # (Note: untrusted input)
            self._set("failure", asdict(failure))
        return first or failure

    def failure(self) -> Failure | None:
        """Return the first failure; None if there was none."""
        return Failure.from_dict(self._get("failure", dict))

    def acknowledge_end(self) -> None:
        """Tell the others that this rank knows why the run ends, and who saves."""
        self._set(f"knows/{self.rank}", 1)

    def knows_of_end(self, rank: int) -> bool:
        """Return whether `rank` knows why the run ends, and who saves."""
        return self._get(f"knows/{rank}", int) is not None

    def count_raised(self) -> int:
        """Count this rank among those that have raised by themselves; return how many have by now."""
        return self._add("num_raised")

    def decide(self, decision: str) -> str:
        """Write what becomes of the process group; return what the first rank to write has decided."""
        first = self._set_first("decision", decision)
        return first if isinstance(first, str) else decision

    def decision(self) -> str | None:
        """Return what becomes of the process group; None if nobody has decided yet."""
        decision: str | None = self._get("decision", str)
        return decision

    def request_stop(self, number: int) -> None:
        """Ask all ranks to stop, because this one has received signal `number`."""
        self._set_first("stop", number)

    def stop_signal(self) -> int:
        """Return the signal by which the first rank to ask wants all to stop; 0 if none does."""
        number: int = self._get("stop", int) or 0
        return number if number in signal.valid_signals() else 0

    def beat(self, state: dict[str, Any]) -> None:
        """Send a heartbeat, with what this rank is doing."""
        self._set(f"beat/{self.rank}", state)

    def last_beats(self) -> dict[int, dict[str, Any]]:
        """Return the newest heartbeats of the other ranks, by rank, without those that have sent none."""
        keys = {rank: self._key(f"beat/{rank}") for rank in range(self.world_size) if rank != self.rank}

        def question() -> list[Any]:
            if self._store.check(list(keys.values())):  # two questions, however many ranks there are
                return list(self._store.multi_get(list(keys.values())))
            return [self._store.get(key) if self._store.check([key]) else None for key in keys.values()]

        beats = zip(keys, self._ask(question) if keys else (), strict=True)
        parsed = ((rank, _parse(beat)) for rank, beat in beats if beat is not None)
        return {rank: beat for rank, beat in parsed if isinstance(beat, dict)}

    def claim(self, what: str) -> bool:
        """Return whether this rank is the one to do `what`, which only one of them shall do."""
        return bool(self._set_first(what, self.rank) == self.rank)

    @property
    def run_id(self) -> str:
        """A name of this run, of 16 hex digits, that no other has and that is the same on all ranks."""
        # A digest, as the name of a file: a part of our own name is from the store, to which strangers may write.
        return hashlib.blake2b(self._name.encode(), digest_size=8).hexdigest()

    def claim_saver(self) -> int | None:
        """Claim to be the rank that saves for all; return which one is: the first to claim it. None: nobody can."""
        saver = self._set_first("saver", self.rank)
        return saver if isinstance(saver, int) else None

    def saver(self) -> int | None:
        """Return the rank that saves for all; None if none has claimed to."""
        saver: int | None = self._get("saver", int)
        return saver

    def is_among_first(self, number: int, what: str) -> bool:
        """Return whether this rank is one of the first `number` that ask this of `what`."""
        return self._add(what) <= number

    def leave(self) -> None:
        """Tell the others that this rank is through with the run."""
        self._set(f"left/{self.rank}", 1)

    def has_left(self, rank: int) -> bool:
        """Return whether `rank` is through with the run."""
        return self._get(f"left/{rank}", int) is not None

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"

    def _set(self, key: str, value: Any) -> None:
        self._ask(lambda: self._store.set(self._key(key), json.dumps(value)))

    def _set_first(self, key: str, value: Any) -> Any:
        """Write `value` unless there is one; return the one that is there."""
        return _parse(self._ask(lambda: self._store.compare_set(self._key(key), "", json.dumps(value))))

    def _add(self, key: str, amount: int = 1) -> int:
        return int(self._ask(lambda: self._store.add(self._key(key), amount)))

    def _get(self, key: str, kind: type) -> Any:
        def question() -> Any:
            # Asking for a key that is not there would wait for it.
            return self._store.get(self._key(key)) if self._store.check([self._key(key)]) else None

        value = None if (raw := self._ask(question)) is None else _parse(raw)
        return value if isinstance(value, kind) else None

    def _ask(self, question: Callable[[], Any]) -> Any:
        answer: Future[Any] = Future()
        self._questions.queue.put((question, answer))
        while not wait([answer], timeout=_LOOKS_EVERY_S).done:
            if self.is_silent():
                raise StoreSilentError(f"The store does not answer rank {self.rank}.")
        return answer.result()


def _parse(raw: bytes) -> Any:
    """Return what the JSON `raw` says; None if it is none (Note: untrusted input)."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


class _Questions:
    """What the store is asked, one after the other. Knows no channel: its thread may have to wait for ever."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self.asked_at: float | None = None

    def answer(self) -> None:
        while (asked := self.queue.get()) is not None:
            question, answer = asked
            self.asked_at = time.monotonic()
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)
            self.asked_at = None
