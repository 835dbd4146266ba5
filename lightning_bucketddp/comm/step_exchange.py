"""Short messages that all ranks exchange in one order: what step each is at, and how much its gradients count.

Note: one exchange for all
    Every exchange is the same small collective between the hosts, whatever its kind. So a rank that has run out of
    data takes part in the next one even while the others take a step, and each of them learns where the others are,
    instead of waiting in different collectives for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any

import torch

from lightning_bucketddp.comm.collectives import Collectives, PendingGather
from lightning_bucketddp.wording import list_ranks


class OutOfStepError(RuntimeError):
    """The ranks are at different places of the training loop."""


class MessageKind(IntEnum):
    """Why a rank sends a message."""

    STEP = 0
    OUT_OF_DATA = 1
    FETCH = 2
    REFERENCE_WEIGHT = 3


@dataclass(frozen=True, slots=True)
class StepMessage:
    """What a rank tells the others.

    Attributes:
        kind: why it is sent.
        epoch: the epoch that the rank is in.
        num_batches: the batches that it has begun in this epoch.
        weight: how much its gradients count; for a fetch, whether it has a batch; or the weight of its first batch.
        full_weight: how much they would count if no step had been skipped.
        num_skipped: the steps that it has skipped.
        stop_signal: the signal that it has received, by which all shall stop; 0: none.
        wants_requeue: it has been told to save and to have the job queued again.
        is_alert: something has gone wrong there that all ranks have to hear of before their next step.
        trainable: identifies its set of trainable parameters.
        digest: of its weights and optimizer state, in the step in which they are compared; else 0.
        batch_digest: of the batches of the step, as long as the first ones are compared; else 0.
    """

    kind: MessageKind
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
    batch_digest: int = 0

    @classmethod
    def from_floats(cls, values: Sequence[float]) -> StepMessage:
        """Return the message that has travelled as a tensor of `values`, one for each field."""
        types: tuple[type[Any], ...] = (MessageKind, int, int, float, float, int, int, bool, bool, int, int, int)
        return cls(*[convert(value) for convert, value in zip(types, values, strict=True)])


class StepExchange:
    """Exchanges messages with the other ranks, in one order (Note: one exchange for all).

    What a signal handler sets here goes out with the next message, so that all ranks learn of it in the same step.
    `digest` goes out with the next message of a step. When messages with different digests have come in,
    `digests_differ` is set; whoever reads that resets it. `batch_digest` goes out in the same way, and those that have
    come in are `batch_digests`, by rank.

    Args:
        has_alert: asked before each message whether it has to alert the others.
    """

    def __init__(self, collectives: Collectives, *, has_alert: Callable[[], bool] = lambda: False) -> None:
        self.epoch = 0
        self.num_batches = 0
        self.stop_signal = 0
        self.wants_requeue = False
        self.all_stop_by = 0
        self.all_requeue = False
        # Some rank has alerted all of them; whoever acts on it resets it.
        self.is_alerted = False
        self._has_alert = has_alert
        self.digest = 0
        self.digests_differ = False
        self.batch_digest = 0
        self.batch_digests: list[int] = []
        self._hosts: Collectives | None = collectives.host_group()
        self._in_flight: deque[PendingGather] = deque()

    def send(
        self,
        kind: MessageKind,
        *,
        weight: float = 0.0,
        full_weight: float = 0.0,
        num_skipped: int = 0,
        trainable: int = 0,
    ) -> None:
        """Send a message to all ranks; `receive` returns theirs."""
        digests = (0, 0)
        if kind == MessageKind.STEP:
            digests = (self.digest, self.batch_digest)
            self.digest = self.batch_digest = 0
        flags = (self.stop_signal, self.wants_requeue, self._has_alert(), trainable, *digests)
        assert self._hosts is not None  # not closed yet
        message = StepMessage(kind, self.epoch, self.num_batches, weight, full_weight, num_skipped, *flags)
        self._in_flight.append(self._hosts.start_gather(torch.tensor(astuple(message), dtype=torch.float64)))

    def receive(self) -> list[StepMessage]:
        """Return the newest message of each rank, by rank. Raises if the ranks are at different places of the loop."""
        messages: list[StepMessage] = []
        while self._in_flight:
            messages = [StepMessage.from_floats(tensor.tolist()) for tensor in self._in_flight.popleft().wait()]
            if len({(message.kind, message.epoch) for message in messages}) > 1:
                raise OutOfStepError(_explain(messages))
            self.all_stop_by = self.all_stop_by or max(message.stop_signal for message in messages)
            self.all_requeue = self.all_requeue or any(message.wants_requeue for message in messages)
            self.is_alerted |= any(message.is_alert for message in messages)
            self.digests_differ |= len({message.digest for message in messages}) > 1
            if any(message.batch_digest for message in messages):
                self.batch_digests = [message.batch_digest for message in messages]
        return messages

    def close(self) -> bool:
        """Exchange no more messages; return whether none is under way, so that the connections may be closed."""
        is_quiet = all(exchange.has_arrived for exchange in self._in_flight)
        self._in_flight.clear()
        self._hosts = None
        return is_quiet


def _explain(messages: Sequence[StepMessage]) -> str:
    last = min(message.epoch for message in messages)
    # A rank in a later epoch has finished this one, too.
    stopped = [rank for rank, m in enumerate(messages) if m.kind == MessageKind.OUT_OF_DATA or m.epoch > last]
    training = [rank for rank in range(len(messages)) if rank not in stopped]
    remedy = (
        "Give every rank the same number of batches, or pass `uneven_data=True` to the strategy: a rank that has run"
        " out then takes part with weight zero until all have."
    )
    if not stopped or not training:
        where = ", ".join(f"rank {r}: {m.kind.name} in epoch {m.epoch}" for r, m in enumerate(messages))
        return f"The ranks have lost step with each other ({where}). {remedy}"
    goes_on = f"{list_ranks(training)} {'goes' if len(training) == 1 else 'go'} on"
    return (
        f"{list_ranks(stopped).capitalize()} {'has' if len(stopped) == 1 else 'have'} no more data in epoch {last},"
        f" while {goes_on} after {messages[training[0]].num_batches} batches. {remedy}"
    )
