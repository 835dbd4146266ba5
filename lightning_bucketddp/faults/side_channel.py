"""What the ranks tell each other outside of collectives, through the store of their process group. JSON only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lightning_bucketddp.faults.failure import Failure

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A rank has received a signal that is meant for all."""

    rank: int
    signal: int


class SideChannel:
    """Keys in the store that belong to one run.

    Args:
        store: a connection of its own: a thread that waits for an answer keeps others waiting.
        name: of the run; the store outlives it.
    """

    def __init__(self, store: Store, *, name: str, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._name = name

    def introduce(self, identity: dict[str, Any]) -> None:
        """Say which process this rank is."""
        self._set(f"identity/{self.rank}", json.dumps(identity))

    def identity_of(self, rank: int) -> dict[str, Any] | None:
        """None if that rank has not said yet."""
        described = self._get(f"identity/{rank}")
        return None if described is None else dict(json.loads(described))

    def report(self, failure: Failure) -> Failure:
        """Tell everyone; the first failure of all, which is the one that counts."""
        return Failure.from_json(self._set_first("failure", failure.to_json()))

    def failure(self) -> Failure | None:
        """The first failure, if there was one."""
        text = self._get("failure")
        return None if text is None else Failure.from_json(text)

    def acknowledge_failure(self) -> None:
        """Say that this rank knows the first failure."""
        self._set(f"knows/{self.rank}", "1")

    def knows_failure(self, rank: int) -> bool:
        return self._get(f"knows/{rank}") is not None

    def count_raised(self) -> int:
        """This rank has raised by itself; how many have by now."""
        return int(self._store.add(self._key("num_raised"), 1))

    def decide(self, decision: str) -> str:
        """What becomes of the group; the first to say so decides."""
        return self._set_first("decision", decision).decode()

    def decision(self) -> str | None:
        text = self._get("decision")
        return None if text is None else text.decode()

    def request_stop(self, number: int) -> None:
        """This rank has received signal `number`: all shall stop."""
        self._set_first("stop", json.dumps(asdict(StopRequest(self.rank, number))))

    def stop_request(self) -> StopRequest | None:
        """The first of them, if there was one."""
        text = self._get("stop")
        return None if text is None else StopRequest(**json.loads(text))

    def beat(self, state: dict[str, Any]) -> None:
        """This rank lives, and is here."""
        self._set(f"beat/{self.rank}", json.dumps(state))

    def last_beat_of(self, rank: int) -> dict[str, Any] | None:
        text = self._get(f"beat/{rank}")
        return None if text is None else dict(json.loads(text))

    def claim(self, what: str) -> bool:
        """Whether this rank is the one to do `what`, which one of them shall do."""
        return self._set_first(what, str(self.rank)) == str(self.rank).encode()

    def leave(self) -> None:
        """This rank is through with the run."""
        self._set(f"left/{self.rank}", "1")

    def has_left(self, rank: int) -> bool:
        return self._get(f"left/{rank}") is not None

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"

    def _set(self, key: str, value: str) -> None:
        self._store.set(self._key(key), value)

    def _set_first(self, key: str, value: str) -> bytes:
        """The value that is there: this one, unless another came first."""
        present: bytes = self._store.compare_set(self._key(key), "", value)
        return present

    def _get(self, key: str) -> bytes | None:
        # Asking for a key that is not there would wait for it.
        return self._store.get(self._key(key)) if self._store.check([self._key(key)]) else None
