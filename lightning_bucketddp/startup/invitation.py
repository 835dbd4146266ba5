"""What ranks that meet write into the store.

Note: invitation
    Rank 0 leaves an invitation in the store. Every other rank answers it, or objects: to another world size, to a rank
    that is taken. Rank 0 waits for all answers or for an objection and writes down the verdict, one for all ranks. The
    store may hold what an earlier start has left there, as torchrun's does after a restart: each invitation has an
    identity, and one that has a verdict when a rank first sees it is over.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from lightning_bucketddp.startup.meeting_point import StartError, part_of

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_MAX_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a rank tells the others about itself."""

    rank: int
    world_size: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


class Invitation:
    """One start: the card of the rank 0 that wants it, and what the others say (Note: invitation)."""

    def __init__(self, store: Store, host: Card) -> None:
        self.host = host
        self._notes = part_of(store, host.identity)
        # It may be over for who sees it only now.
        self.is_open = not self._notes.check(["verdict"])
        self._own_objection: str | None = None

    @classmethod
    def find(cls, store: Store) -> Invitation | None:
        """The newest one."""
        return cls(store, _card(store.get("invitation"))) if store.check(["invitation"]) else None

    def post(self, store: Store) -> None:
        """Make it the newest one."""
        self.answer(self.host)
        store.set("invitation", _json(self.host))

    def answer(self, card: Card) -> None:
        """Join, or object."""
        if card.world_size != self.host.world_size:
            self.object(
                f"Rank 0 ({self.host}) was started as one of {self.host.world_size}, but rank {card.rank} ({card}) as"
                f" one of {card.world_size}. Start every node with the same `devices` and `num_nodes`, and give"
                " different runs different ports (`MASTER_PORT`)."
            )
        elif (there := _card(self._notes.compare_set(_answer(card.rank), "", _json(card)))) != card:
            self.object(explain_taken(there, card))

    def object(self, why: str) -> None:
        """Have rank 0 refuse the start; the first objection counts."""
        self._own_objection = why
        self._notes.compare_set("objection", "", json.dumps(why))

    def objection(self) -> str | None:
        return str(json.loads(self._notes.get("objection"))) if self._notes.check(["objection"]) else None

    def decide(self, why_not: str | None) -> None:
        """Start, or not and why."""
        self._notes.set("verdict", json.dumps(why_not))

    def is_accepted(self, card: Card) -> bool:
        """Whether there is a verdict that all start; raises if it is that they do not, or do so without this rank."""
        if not self._notes.check(["verdict"]):
            return False
        why_not = json.loads(self._notes.get("verdict")) or self._own_objection
        self.leave(card)
        if why_not is not None:
            raise StartError(why_not)
        return True

    def leave(self, card: Card) -> None:
        """Tell rank 0 that it need not stay for this rank."""
        self._notes.set(_left(card.rank), "")

    def all_have_answered(self) -> bool:
        return bool(self._notes.check([_answer(rank) for rank in range(self.host.world_size)]))

    def all_have_left(self) -> bool:
        there = set(range(1, self.host.world_size)) - set(self.missing())
        return bool(self._notes.check([_left(rank) for rank in there]))

    def missing(self) -> list[int]:
        return [rank for rank in range(self.host.world_size) if not self._notes.check([_answer(rank)])]

    def present(self) -> list[Card]:
        """The cards of those who have answered."""
        missing = self.missing()
        return [_card(self._notes.get(_answer(r))) for r in range(self.host.world_size) if r not in missing]


def explain_taken(there: Card, card: Card) -> str:
    """What to do about two processes of one rank."""
    return (
        f"Two processes want to be rank {there.rank}: {there}, and {card}. Give every node a `NODE_RANK` of its own,"
        " and different runs different ports (`MASTER_PORT`)."
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """The first of `ranks` by number."""
    return f"rank{'s' if len(ranks) > 1 else ''} {name_some(ranks)}"


def _answer(rank: int) -> str:
    return f"answer/{rank}"


def _left(rank: int) -> str:
    return f"left/{rank}"


def _json(card: Card) -> str:
    return json.dumps(asdict(card))


def _card(raw: bytes) -> Card:
    return Card(**json.loads(raw))


def name_some(things: Sequence[object]) -> str:
    """The first of `things`, and how many more there are."""
    named = ", ".join(map(str, things[:_MAX_NAMED]))
    return named if len(things) <= _MAX_NAMED else f"{named} and {len(things) - _MAX_NAMED} more"
