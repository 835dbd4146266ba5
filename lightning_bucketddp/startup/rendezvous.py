"""The rendezvous: the ranks of a run make sure that all of them are there, before they make a process group.

Note: rendezvous
    Rank 0 opens a round in the store. Every other rank joins it, or objects: to another world size, to a rank that is
    taken. Rank 0 writes the outcome for all ranks: which of them start, or why none does. The store may hold keys of an
    earlier start, as torchrun's does after a restart: each round has an identity, and a round that has an outcome when
    a rank first sees it is over. A rank that others have started without knocks, and waits for a restart. In a restart
    the rank that holds the store takes the place of rank 0.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent import futures
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_bucketddp.processes import Worker
from lightning_bucketddp.startup.store import POLL_S, Deadline, StartError, StoreAddress, listen, log, part_of
from lightning_bucketddp.wording import list_some, list_some_ranks

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

# How long rank 0 keeps the store open, so that the others can read why nothing starts.
_OUTCOME_READ_WITHIN_S = 2.0
START = "bucketddp/start"
# How long a thread that has no more reason to wait may take to end.
_GRACE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """What a rank reports to the others about itself."""

    rank: int
    world_size: int
    num_fits: int = 0
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> RankInfo:
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise StartError(
                "The store at the main address holds data of another program, or of another version of"
                " lightning-bucketddp. Install one version on all hosts, and give this run a port of its own"
                " (`MASTER_PORT`)."
            ) from error


class RendezvousRound:
    """One round in the store: the rank 0 that has opened it, and who joins or objects (Note: rendezvous)."""

    def __init__(self, store: Store, host: RankInfo) -> None:
        self.host = host
        self._keys = part_of(store, host.identity)
        self.is_open = not self._keys.check(["outcome"])  # otherwise it was over before this rank saw it
        self.own_objection: str | None = None

    @classmethod
    def find(cls, store: Store) -> RendezvousRound | None:
        return cls(store, RankInfo.from_json(store.get("round"))) if store.check(["round"]) else None

    def post(self, store: Store) -> None:
        """Make this the newest round, and join it."""
        self.join(self.host)
        store.set("round", self.host.to_json())

    def join(self, info: RankInfo) -> None:
        """Join this round as the rank in `info`, or object to it."""
        if info.world_size != self.host.world_size:
            self.object(
                f"Rank 0 ({self.host}) was started as one of {self.host.world_size}, but rank {info.rank} ({info}) as"
                f" one of {info.world_size}. Start every node with the same `devices` and `num_nodes`, and give"
                " different runs different ports (`MASTER_PORT`)."
            )
        elif info.num_fits != self.host.num_fits:
            self.object(
                f"Rank {info.rank} ({info}) is in fit or evaluation {info.num_fits + 1} of its program, rank"
                f" 0 in {self.host.num_fits + 1}: a new process begins with the first. Start with"
                " `start_method='spawn'`."
            )
        else:
            there = RankInfo.from_json(self._keys.compare_set(f"joined/{info.rank}", "", info.to_json()))
            if there != info:
                self.object(explain_taken(there, info))

    def object(self, why: str) -> None:
        """Have rank 0 refuse the start; the first objection counts."""
        self.own_objection = why
        self._keys.compare_set("objection", "", json.dumps(why))

    def objection(self) -> str | None:
        return json.loads(self._keys.get("objection")) if self._keys.check(["objection"]) else None

    def decide(self, outcome: list[int] | str) -> None:
        """Write the outcome: the ranks that start, or why none does."""
        self._keys.set("outcome", json.dumps(outcome))

    def outcome(self) -> Any:
        """Return what was decided; None: nothing yet."""
        return json.loads(self._keys.get("outcome")) if self._keys.check(["outcome"]) else None

    def ranks_for(self, info: RankInfo) -> list[int] | None:
        """Return the ranks that start; None until that is decided. Raises if none does, or if this one has objected."""
        if (outcome := self.outcome()) is None:
            return None
        self.leave(info)
        if not isinstance(outcome, list) or self.own_objection is not None:
            raise StartError(self.own_objection if isinstance(outcome, list) else outcome)
        return outcome

    def leave(self, info: RankInfo) -> None:
        """Report to rank 0 that this rank knows the outcome."""
        self._keys.set(f"left/{info.rank}", "")

    def await_leave(self, deadline: Deadline) -> None:
        """Wait a little until all ranks that have joined know the outcome."""
        others = [f"left/{info.rank}" for info in self.present() if info.rank != self.host.rank]
        until = time.monotonic() + _OUTCOME_READ_WITHIN_S
        while not self._keys.check(others) and time.monotonic() < until:
            deadline.pause()

    def have_joined(self, ranks: Iterable[int]) -> bool:
        return bool(self._keys.check([f"joined/{rank}" for rank in ranks]))

    def missing(self) -> list[int]:
        ranks = range(self.host.world_size)
        return [] if self.have_joined(ranks) else [rank for rank in ranks if not self.have_joined([rank])]

    def present(self) -> list[RankInfo]:
        ranks = set(range(self.host.world_size)).difference(self.missing())
        return [RankInfo.from_json(self._keys.get(f"joined/{rank}")) for rank in sorted(ranks)]


def explain_taken(there: RankInfo, info: RankInfo) -> str:
    return (
        f"Two processes want to be rank {there.rank}: {there}, and {info}. Give every node a `NODE_RANK` of its own,"
        " and different runs different ports (`MASTER_PORT`)."
    )


def knocks_of(store: Store, ranks: Iterable[int]) -> list[int]:
    """Return those of `ranks` that have knocked at `store`, with the prefix `START`."""
    return [rank for rank in ranks if store.check([f"knock/{rank}"])]


class Rendezvous:
    """Brings the ranks of a run together (Note: rendezvous); `option` is what sets `timeout_s` for the user."""

    def __init__(self, address: StoreAddress, *, timeout_s: float, option: str = "Timeouts(start_s=...)") -> None:
        self._address = address
        self._option = option
        # Rank 0 starts with those that are awaited, or with at least so many ranks after `timeout_s`; None: never.
        self.awaited = set(range(address.world_size))
        self.min_ranks: int | None = None
        self.opens_round = address.rank == 0
        # When a rank makes a store in place of one that has gone with its rank; None: never.
        self.takes_over_after_s: float | None = None
        self.ranks: list[int] = []  # that start, by the numbers that they were launched with
        self._info = RankInfo(rank=address.rank, world_size=address.world_size, num_fits=address.num_fits)
        self._deadline = Deadline(timeout_s, world_size=address.world_size)

    def meet(
        self,
        *,
        listener: socket.socket | None,
        find_failure: Callable[[], str | None],
        earlier: PrefixStore | None = None,
    ) -> Store:
        """Wait until all ranks are there; return a store for them alone. Raises `StartError` on all if some stay away.

        Args:
            listener: a socket that listens at the port of the store; it is used up. None: one is opened.
            find_failure: asked again and again for a reason why it is useless to wait on.
            earlier: the store that an earlier call has returned to this process; it is used again.
        """
        # In a thread, because torch waits for ever for the answer of a program that listens and is not a store.
        joined = Worker("bucketddp-start").submit(partial(self._run, listener, earlier))
        failed_at_s = math.inf
        while not futures.wait([joined], timeout=POLL_S).done:
            if self._deadline.failure is None and (failure := find_failure()) is not None:
                self._deadline.failure, failed_at_s = failure, self._deadline.waited_s
            last_moment_s = min(self._deadline.timeout_s, failed_at_s) + _OUTCOME_READ_WITHIN_S + _GRACE_S
            if self._deadline.waited_s > last_moment_s:
                silence = "something listens there and does not answer, maybe another program"
                why = self._address.explain_unreachable(silence, self._deadline.timeout_s)
                raise StartError(self._deadline.failure or why)
        return joined.result()

    def _run(self, listener: socket.socket | None, earlier: PrefixStore | None) -> Store:
        if earlier is not None:
            whole_store: Store = earlier.underlying_store
        else:
            if self.takes_over_after_s is not None:
                listener = self._take_over(self.takes_over_after_s)
            server = self._address.open_server(listener, deadline=self._deadline) if self._address.is_host else None
            whole_store = self._address.connect(deadline=self._deadline)
            del server  # our own connection keeps it open now
        store = part_of(whole_store, START)
        rdzv = self._open_round(store) if self.opens_round else self._join(store)
        # Not the whole store: process groups do not know that an earlier one has used the same names.
        return part_of(whole_store, f"bucketddp/group/{rdzv.host.identity}")

    def _take_over(self, after_s: float) -> socket.socket | None:
        """Wait for a store that has gone with its rank. Return a socket for another, if its address is on this host."""
        with suppress(StartError):
            self._address.connect(deadline=Deadline(after_s, world_size=self._info.world_size))
            return None
        # Of those that can listen there one does, and the others find it.
        with suppress(StartError, OSError):
            listen(self._address.port, address=self._address.address).close()  # raises if that is another host's
            listener = listen(self._address.port, address=self._address.address if self._address.is_local else None)
            self._address, self.opens_round = replace(self._address, takes_over=True), True
            log.warning(f"bucketddp: rank {self._info.rank} makes a new store at {self._address}.")
            return listener
        return None

    def _open_round(self, store: Store) -> RendezvousRound:
        for rank in knocks_of(store, set(range(self._info.world_size)) - self.awaited):
            self.awaited.add(rank)
            store.delete_key(f"knock/{rank}")  # it may be gone again
        rdzv = RendezvousRound(store, self._info)
        rdzv.post(store)
        while not rdzv.have_joined(self.awaited) and not self._are_enough(rdzv):
            newest = RendezvousRound.find(store)
            if newest is not None and newest.host != self._info:
                newest.object(explain_taken(self._info, newest.host))
                why_not: str | None = explain_taken(self._info, newest.host)
            else:
                why_not = rdzv.objection() or self._reason_to_give_up(rdzv)
            # Time has passed: they may be enough by now.
            if why_not is not None and not self._are_enough(rdzv):
                rdzv.decide(why_not)
                rdzv.await_leave(self._deadline)
                raise StartError(why_not)
            self._deadline.report(lambda: f"{list_some_ranks(rdzv.missing())} to join at {self._address}")
            self._deadline.pause()
        # First the one that holds the store: rank 0 from now on.
        self.ranks = [self._info.rank, *(info.rank for info in rdzv.present() if info.rank != self._info.rank)]
        rdzv.decide(self.ranks)
        return rdzv

    def _are_enough(self, rdzv: RendezvousRound) -> bool:
        is_due = self.min_ranks is not None and self._deadline.is_over and rdzv.objection() is None
        return is_due and len(rdzv.present()) >= (self.min_ranks or 0)

    def _join(self, store: Store) -> RendezvousRound:
        rdzv: RendezvousRound | None = None
        try:
            while True:
                newest = RendezvousRound.find(store)
                if newest is not None and (rdzv is None or newest.host != rdzv.host):
                    rdzv = newest
                    if rdzv.is_open:
                        rdzv.join(self._info)
                if rdzv is not None and rdzv.is_open and (ranks := rdzv.ranks_for(self._info)) is not None:
                    if self._info.rank in ranks:
                        self.ranks = ranks
                        return rdzv
                    rdzv.is_open = False
                if rdzv is not None and not rdzv.is_open and self._deadline.timeout_s < math.inf:
                    self._knock_if_left_out(store, rdzv)
                if (why_not := self._reason_to_give_up(rdzv)) is not None:
                    if rdzv is not None:
                        rdzv.object(why_not)
                        rdzv.leave(self._info)
                    raise StartError(why_not)
                self._deadline.pause()
        except StartError:
            raise
        except RuntimeError as error:
            if rdzv is not None and rdzv.own_objection is not None:
                # Rank 0 has read it, and does not wait for a rank that does not join.
                raise StartError(rdzv.own_objection) from error
            raise StartError(
                f"Rank {self._info.rank} lost the connection to {self._address} before all ranks had joined: the"
                " process of rank 0 has ended. Its output says why."
            ) from error

    def _knock_if_left_out(self, store: Store, rdzv: RendezvousRound) -> None:
        is_of_run = isinstance(ranks := rdzv.outcome(), list) and rdzv.host.world_size == self._info.world_size
        if is_of_run and self._info.rank not in ranks:
            store.set(f"knock/{self._info.rank}", "")
            self._deadline.timeout_s = math.inf
            log.warning(f"bucketddp: the run goes on without rank {self._info.rank}, which waits for a checkpoint.")

    def _reason_to_give_up(self, rdzv: RendezvousRound | None) -> str | None:
        if self._deadline.failure is not None or not self._deadline.is_over:
            return self._deadline.failure
        where = f"at {self._address} within {self._deadline.timeout_s:g} s"
        if rdzv is not None and not rdzv.is_open:
            what = f"Rank {self._info.rank} found {where} only a start without it, of rank 0 ({rdzv.host})."
        else:
            missing = [0] if rdzv is None else rdzv.missing()
            what = f"{list_some_ranks(missing).capitalize()} of {self._info.world_size} did not join {where}."
        if present := [] if rdzv is None else rdzv.present():
            what += f" {len(present)} did, from host {list_some(sorted({info.host for info in present}))}."
        if self.min_ranks is not None:
            what += f" The run needs {self.min_ranks} of them (`min_ranks`)."
        return (
            f"{what} Look at the output of the missing ranks; check that every node was started, with the same"
            " `devices` and `num_nodes`, and reaches that address, and that no other run uses it. If it only takes"
            f" longer, pass a larger `{self._option}`."
        )
