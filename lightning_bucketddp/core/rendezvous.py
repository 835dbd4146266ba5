"""How the ranks of a run make sure that all of them are there, before they make a process group.

Note: check-in
    Every rank leaves a card in the store and compares it with those that it finds: another world size, and a rank that
    is taken, are refused at once. Rank 0 waits until all cards are there. What comes of it is the verdict, one for all
    ranks: the first that somebody writes down counts.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar, NoReturn

from lightning_bucketddp.core.meeting_point import POLL_S, MeetingPoint, Patience, StartError, part_of

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

# How long the host of the store stays, so that the others can read why nothing starts.
_FAREWELL_S = 2.0
# How long a thread that has no more reason to wait may take to say so.
_GRACE_S = 2.0
_MAX_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a rank tells the others about itself."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


class Rendezvous:
    """Where the ranks of one run meet (Note: check-in). Keep it until the process group is made: it may host the store.

    Args:
        point: where the store is.
        timeout_s: how long the ranks wait for each other.
    """

    # A store that outlives its process group still has the cards of the earlier start.
    _num_meetings: ClassVar[int] = 0

    def __init__(self, point: MeetingPoint, *, timeout_s: float) -> None:
        self._point = point
        self._card = Card(
            rank=point.rank,
            world_size=point.world_size,
            local_rank=point.local_rank,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        self._patience = Patience(timeout_s)
        self._server: Store | None = None

    def meet(self, *, listener: socket.socket | None, find_failure: Callable[[], str | None]) -> None:
        """Return when all ranks are there, or raise `StartError` on all that are.

        Args:
            listener: a socket that listens at the port, where the store is to be; it is used up. None: one is opened.
            find_failure: asked again and again for a reason why waiting is in vain.
        """
        meeting: futures.Future[None] = futures.Future()
        # In a thread, because torch waits for ever for the answer of a program that listens and is not a store. If it
        # does, the thread ends with the process.
        threading.Thread(target=self._run, args=(meeting, listener), daemon=True, name="bucketddp-start").start()
        last_moment_s = self._patience.timeout_s + _GRACE_S
        while not futures.wait([meeting], timeout=POLL_S).done:
            if self._patience.failure is None and (failure := find_failure()) is not None:
                self._patience.failure = failure
                last_moment_s = min(last_moment_s, self._patience.waited_s + _FAREWELL_S + _GRACE_S)
            if self._patience.waited_s > last_moment_s:
                silence = "something listens there and does not answer, maybe another program"
                why = self._point.explain_unreachable(silence, self._patience.timeout_s)
                raise StartError(self._patience.failure or why)
        meeting.result()
        Rendezvous._num_meetings += 1

    def _run(self, meeting: futures.Future[None], listener: socket.socket | None) -> None:
        try:
            self._meet(listener)
        except BaseException as error:
            meeting.set_exception(error)
        else:
            meeting.set_result(None)

    def _meet(self, listener: socket.socket | None) -> None:
        if self._point.is_host:
            self._server = self._point.open_server(listener, patience=self._patience)
        store = part_of(self._point.connect(patience=self._patience), f"bucketddp/start/{self._num_meetings}")
        try:
            self._check_in(store)
            self._wait_for_verdict(store)
        except StartError:
            if self._point.is_host:
                self._take_leave(store)
            raise
        except RuntimeError as error:
            raise StartError(
                f"Rank {self._card.rank} lost the connection to {self._point} before all ranks had joined: the process"
                " of rank 0 has ended. Its output says why."
            ) from error

    def _check_in(self, store: Store) -> None:
        mine = json.dumps(asdict(self._card))
        first = _card(store.compare_set("first", "", mine))
        if first.world_size != self._card.world_size:
            self._refuse(
                store,
                f"Rank {first.rank} ({first}) was started as one of {first.world_size}, but rank {self._card.rank}"
                f" ({self._card}) as one of {self._card.world_size}. Start every node with the same `devices` and"
                " `num_nodes`, and give different runs different ports (`MASTER_PORT`).",
            )
        there = _card(store.compare_set(_key(self._card.rank), "", mine))
        if there != self._card:
            self._refuse(
                store,
                f"Two processes want to be rank {there.rank}: {there}, and {self._card}. Give every node a `NODE_RANK`"
                " of its own, and different runs different ports (`MASTER_PORT`).",
            )

    def _wait_for_verdict(self, store: Store) -> None:
        everybody = [_key(rank) for rank in range(self._card.world_size)]
        while not store.check(["verdict"]):
            if self._card.rank == 0 and store.check(everybody):
                store.compare_set("verdict", "", json.dumps({"error": None}))
            elif self._patience.failure is not None:
                self._refuse(store, self._patience.failure)
            elif self._patience.is_over:
                self._refuse(store, self._explain_missing(store))
            else:
                if self._card.rank == 0:
                    self._patience.report(lambda: f"{_ranks(self._missing(store))} to join at {self._point}")
                time.sleep(POLL_S)
        error = json.loads(store.get("verdict"))["error"]
        store.set(_read_key(self._card.rank), "")
        if error is not None:
            raise StartError(error)

    def _refuse(self, store: Store, why: str) -> NoReturn:
        store.compare_set("verdict", "", json.dumps({"error": why}))
        store.set(_read_key(self._card.rank), "")
        raise StartError(why)

    def _take_leave(self, store: Store) -> None:
        """Stay until the others have read the verdict."""
        missing = self._missing(store)
        readers = [_read_key(rank) for rank in range(self._card.world_size) if rank not in missing]
        until = time.monotonic() + _FAREWELL_S
        with suppress(RuntimeError):
            while not store.check(readers) and time.monotonic() < until:
                time.sleep(POLL_S)

    def _missing(self, store: Store) -> list[int]:
        return [rank for rank in range(self._card.world_size) if not store.check([_key(rank)])]

    def _explain_missing(self, store: Store) -> str:
        missing = self._missing(store)
        there = [_card(store.get(_key(r))) for r in range(self._card.world_size) if r not in missing]
        return (
            f"{_ranks(missing).capitalize()} of {self._card.world_size} did not join at {self._point} within"
            f" {self._patience.timeout_s:g} s; {len(there)} did, from host {_some(sorted({c.host for c in there}))}."
            " Look at the output of what is missing; check that every node was started, with the same `devices` and"
            " `num_nodes`, and reaches that address. If it only takes longer, pass a larger `start_timeout_s`."
        )


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _read_key(rank: int) -> str:
    return f"read/{rank}"


def _card(raw: bytes) -> Card:
    return Card(**json.loads(raw))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_some(ranks)}"


def _some(things: Sequence[object]) -> str:
    named = ", ".join(map(str, things[:_MAX_NAMED]))
    return named if len(things) <= _MAX_NAMED else f"{named} and {len(things) - _MAX_NAMED} more"
