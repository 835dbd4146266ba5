"""Short notes that all ranks exchange in one order: where each of them is, and how much its gradients count.

Note: lockstep
    Every exchange is the same small collective between the hosts, whatever its occasion. So a rank that has run out of
    data meets the others in the next one even while they take a step, and each of them learns who is where, instead of
    waiting in different collectives for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any

import torch

from lightning_bucketddp.comm.collectives import Collectives, PendingGather


class OutOfStepError(RuntimeError):
    """The ranks are at different places of the training loop."""


class Occasion(IntEnum):
    """Why a rank sends a note."""

    STEP = 0
    OUT_OF_DATA = 1
    FETCH = 2
    REFERENCE_WEIGHT = 3


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank tells the others.

    Attributes:
        occasion: why it is sent.
        epoch: the epoch that the rank is in.
        num_batches: the batches that it has begun in this epoch.
        weight: how much its gradients count; for a fetch, whether it has a batch; or the weight of its first batch.
        full_weight: how much they would count if no step had been skipped.
        num_skipped: the steps that it has skipped.
        stop_signal: the signal that it has received, by which all shall stop; 0: none.
        wants_requeue: it has been told to save and to have the job queued again.
        is_alert: something has gone wrong there that all ranks have to hear of before their next step.
        trainable: identifies its set of trainable parameters.
        digest: what it makes of its weights and optimizer state, in the step in which they are compared; else 0.
    """

    occasion: Occasion
    epoch: int
    num_batches: int
    weight: float = 0.0
    full_weight: float = 0.0
    num_skipped: int = 0
    stop_signal: int = 0
    wants_requeue: bool = False
    is_alert: bool = False
    trainable: int = 0
    digest: int = 0


# Notes travel as numbers. What their fields are, in order:
_KINDS: tuple[type[Any], ...] = (Occasion, int, int, float, float, int, int, bool, bool, int, int)


class Lockstep:
    """Exchanges notes with the other ranks, in one order (Note: lockstep).

    What a signal handler sets here goes out with the next note, so that all ranks learn of it in the same step.
    `digest` goes out with the next note of a step. When notes with different ones have come in, `digests_differ` is
    set; who reads that resets it.

    Args:
        collectives: how to reach the other ranks; notes take connections of their own between the hosts.
        has_alert: asked before each note whether it has to alert the others.
    """

    def __init__(self, collectives: Collectives, *, has_alert: Callable[[], bool] = lambda: False) -> None:
        self.epoch = 0
        self.num_batches = 0
        self.stop_signal = 0
        self.wants_requeue = False
        self.all_stop_by = 0
        self.all_requeue = False
        # Some rank has alerted all of them. Whoever acts on it takes it back.
        self.is_alerted = False
        self._has_alert = has_alert
        self.digest = 0
        self.digests_differ = False
        self._hosts: Collectives | None = collectives.host_group()
        self._in_flight: deque[PendingGather] = deque()

    def send(
        self,
        occasion: Occasion,
        *,
        weight: float = 0.0,
        full_weight: float = 0.0,
        num_skipped: int = 0,
        trainable: int = 0,
    ) -> None:
        """Start an exchange; `receive` ends it."""
        digest = 0
        if occasion == Occasion.STEP:
            digest, self.digest = self.digest, 0
        flags = (self.stop_signal, self.wants_requeue, self._has_alert(), trainable, digest)
        assert self._hosts is not None  # not closed yet
        note = Note(occasion, self.epoch, self.num_batches, weight, full_weight, num_skipped, *flags)
        self._in_flight.append(self._hosts.start_gather(torch.tensor(astuple(note), dtype=torch.float64)))

    def receive(self) -> list[Note]:
        """The notes of all ranks, by rank, in the newest exchange. Raises if the ranks met on different occasions."""
        notes: list[Note] = []
        while self._in_flight:
            notes = [_note(tensor.tolist()) for tensor in self._in_flight.popleft().wait()]
            if len({(note.occasion, note.epoch) for note in notes}) > 1:
                raise OutOfStepError(_explain(notes))
            self.all_stop_by = self.all_stop_by or max(note.stop_signal for note in notes)
            self.all_requeue = self.all_requeue or any(note.wants_requeue for note in notes)
            self.is_alerted |= any(note.is_alert for note in notes)
            self.digests_differ |= len({note.digest for note in notes}) > 1
        return notes

    def close(self) -> bool:
        """Exchange no more notes; whether nothing is under way, and the connections may be closed."""
        is_quiet = all(exchange.has_arrived for exchange in self._in_flight)
        self._in_flight.clear()
        self._hosts = None
        return is_quiet


def _note(values: Sequence[float]) -> Note:
    return Note(*[kind(value) for kind, value in zip(_KINDS, values, strict=True)])


def _explain(notes: Sequence[Note]) -> str:
    last = min(note.epoch for note in notes)
    # Who is in a later epoch has finished this one, too.
    stopped = [rank for rank, n in enumerate(notes) if n.occasion == Occasion.OUT_OF_DATA or n.epoch > last]
    training = [rank for rank in range(len(notes)) if rank not in stopped]
    remedy = (
        "Give every rank the same number of batches, or pass `uneven_data=True` to the strategy: a rank that has run"
        " out then takes part with weight zero until all have."
    )
    if not stopped or not training:
        where = ", ".join(f"rank {r}: {n.occasion.name} in epoch {n.epoch}" for r, n in enumerate(notes))
        return f"The ranks have lost step with each other ({where}). {remedy}"
    goes_on = f"{_ranks(training)} {'goes' if len(training) == 1 else 'go'} on"
    return (
        f"{_ranks(stopped).capitalize()} {'has' if len(stopped) == 1 else 'have'} no more data in epoch {last}, while"
        f" {goes_on} after {notes[training[0]].num_batches} batches. {remedy}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
