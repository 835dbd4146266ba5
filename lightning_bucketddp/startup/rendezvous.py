"""How the ranks of a run make sure that all of them are there, before they make a process group."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import TYPE_CHECKING

from lightning_bucketddp.startup.invitation import Card, Invitation, explain_taken, name_ranks, name_some
from lightning_bucketddp.startup.meeting_point import POLL_S, MeetingPoint, Patience, StartError, part_of

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

# How long rank 0 stays, so that the others can read why nothing starts.
_FAREWELL_S = 2.0
# How long a thread that has no more reason to wait may take to say so.
_GRACE_S = 2.0
# Thousands of ranks ask less often, so that together they ask no more than the store can answer.
_POLL_PER_RANK_S = 0.0005
# The last rank to come gets its answer soon. It asks less and less often, up to the interval of the others.
_FIRST_POLL_S = 0.005


class Rendezvous:
    """Where the ranks of a run meet (Note: invitation).

    Args:
        point: where the store is.
        timeout_s: how long the ranks wait for each other.
        option: what a user has to change for a longer time.
    """

    def __init__(self, point: MeetingPoint, *, timeout_s: float, option: str = "start_timeout_s") -> None:
        self._point = point
        self._option = option
        self._card = Card(rank=point.rank, world_size=point.world_size)
        self._patience = Patience(timeout_s)
        self._poll_s = max(POLL_S, _POLL_PER_RANK_S * point.world_size)

    def meet(self, *, listener: socket.socket | None, find_failure: Callable[[], str | None]) -> Store:
        """When all ranks are there, a store for them alone; `StartError` on all that are there, if some are missing.

        Args:
            listener: a socket that listens at the port, where the store is to be; it is used up. None: one is opened.
            find_failure: asked again and again for a reason why waiting is in vain.
        """
        meeting: futures.Future[Store] = futures.Future()
        # In a thread, because torch waits for ever for the answer of a program that listens and is not a store. If it
        # does, the thread ends with the process.
        threading.Thread(target=self._run, args=(meeting, listener), daemon=True, name="bucketddp-start").start()
        last_moment_s = self._patience.timeout_s + _FAREWELL_S + _GRACE_S
        while not futures.wait([meeting], timeout=POLL_S).done:
            if self._patience.failure is None and (failure := find_failure()) is not None:
                self._patience.failure = failure
                last_moment_s = min(last_moment_s, self._patience.waited_s + _FAREWELL_S + _GRACE_S)
            if self._patience.waited_s > last_moment_s:
                silence = "something listens there and does not answer, maybe another program"
                why = self._point.explain_unreachable(silence, self._patience.timeout_s)
                raise StartError(self._patience.failure or why)
        return meeting.result()

    def _run(self, meeting: futures.Future[Store], listener: socket.socket | None) -> None:
        try:
            server = self._point.open_server(listener, patience=self._patience) if self._point.is_host else None
            whole_store = self._point.connect(patience=self._patience)
            del server  # which is the store's now
            store = part_of(whole_store, "bucketddp/start")
            invitation = self._invite(store) if self._card.rank == 0 else self._join(store)
            # Not the whole: process groups do not know that an earlier one has used the same names.
            meeting.set_result(part_of(whole_store, f"bucketddp/group/{invitation.host.identity}"))
        except BaseException as error:
            meeting.set_exception(error)

    def _invite(self, store: Store) -> Invitation:
        invitation = Invitation(store, self._card)
        invitation.post(store)
        while not invitation.all_have_answered():
            if (why_not := self._find_objection(store, invitation)) is not None:
                invitation.decide(why_not)
                self._take_leave(invitation)
                raise StartError(why_not)
            self._patience.report(lambda: f"{name_ranks(invitation.missing())} to join at {self._point}")
            time.sleep(self._poll_s)
        invitation.decide(None)
        return invitation

    def _find_objection(self, store: Store, invitation: Invitation) -> str | None:
        newest = Invitation.find(store)
        if newest is not None and newest.host != self._card:
            newest.object(explain_taken(self._card, newest.host))
            return explain_taken(self._card, newest.host)
        return invitation.objection() or self._reason_to_give_up(invitation)

    def _take_leave(self, invitation: Invitation) -> None:
        until = time.monotonic() + _FAREWELL_S
        while not invitation.all_have_left() and time.monotonic() < until:
            time.sleep(self._poll_s)

    def _join(self, store: Store) -> Invitation:
        try:
            return self._wait_for_verdict(store)
        except StartError:
            raise
        except RuntimeError as error:
            raise StartError(
                f"Rank {self._card.rank} lost the connection to {self._point} before all ranks had joined: the process"
                " of rank 0 has ended. Its output says why."
            ) from error

    def _wait_for_verdict(self, store: Store) -> Invitation:
        invitation: Invitation | None = None
        poll_s = _FIRST_POLL_S
        while True:
            newest = Invitation.find(store)
            if newest is not None and (invitation is None or newest.host != invitation.host):
                invitation = newest
                if invitation.is_open:
                    invitation.answer(self._card)
            if invitation is not None and invitation.is_open and invitation.is_accepted(self._card):
                return invitation
            if (why_not := self._reason_to_give_up(invitation)) is not None:
                if invitation is not None:
                    invitation.object(why_not)
                    invitation.leave(self._card)
                raise StartError(why_not)
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, self._poll_s)

    def _reason_to_give_up(self, invitation: Invitation | None) -> str | None:
        if self._patience.failure is not None or not self._patience.is_over:
            return self._patience.failure
        where = f"at {self._point} within {self._patience.timeout_s:g} s"
        if invitation is not None and not invitation.is_open:
            what = f"Rank {self._card.rank} found {where} only a start without it, of rank 0 ({invitation.host})."
        else:
            missing = [0] if invitation is None else invitation.missing()
            what = f"{name_ranks(missing).capitalize()} of {self._card.world_size} did not join {where}."
        there = [] if invitation is None else invitation.present()
        if there:
            what += f" {len(there)} did, from host {name_some(sorted({card.host for card in there}))}."
        return (
            f"{what} Look at the output of what is missing; check that every node was started, with the same `devices`"
            " and `num_nodes`, and reaches that address, and that no other run uses it. If it only takes longer, pass a"
            f" larger `{self._option}`."
        )
