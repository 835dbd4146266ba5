"""Short messages that all ranks exchange in one order: what step each is at, and how much its gradients count."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
    COMPARISON = 4
    OUTER_STEP = 5


@dataclass(frozen=True, slots=True)
class StepMessage:
    """What a rank tells the others."""

    kind: MessageKind = MessageKind.STEP
    epoch: int = 0
    num_batches: int = 0  # begun in this epoch
    # How much its gradients count; for a fetch, whether it has a batch; or the weight of its first batch; or the number
    # that is compared.
    weight: float = 0.0
    full_weight: float = 0.0  # how much its gradients would count if no step had been skipped
    num_skipped: int = 0  # steps
    stop_signal: int = 0  # the signal that it has received, by which all shall stop; 0: none
    wants_requeue: bool = False  # it has been told to save and to have the job queued again
    is_alert: bool = False  # something has gone wrong there that all ranks have to hear of before their next step
    trainable: int = 0  # identifies its set of trainable parameters
    digest: int = 0  # of its weights and optimizer state, in the step in which they are compared; else 0
    batch_digest: int = 0  # of the batches of the step, as long as the first ones are compared; else 0
    num_missing: int = 0  # the gradients that it did not have in its last backward

    @classmethod
    def from_floats(cls, values: Sequence[float]) -> StepMessage:
        """Return the message that has travelled as a tensor of `values`, one for each field."""
        types: tuple[type[Any], ...] = (MessageKind, int, int, float, float, int, int, bool, bool, *[int] * 4)
        return cls(*[convert(value) for convert, value in zip(types, values, strict=True)])


@dataclass(frozen=True, slots=True)
class CombinedMessages:
    """What the messages of all ranks come to: sums over the ranks, and the least and greatest value of each field."""

    weight: float = 0.0
    full_weight: float = 0.0
    num_skipped: int = 0
    least: StepMessage = StepMessage()
    greatest: StepMessage = StepMessage()
    by_rank: Sequence[StepMessage] = ()

    @classmethod
    def of(cls, by_rank: Sequence[StepMessage]) -> CombinedMessages:
        fields = list(zip(*map(astuple, by_rank), strict=True))
        return cls(
            weight=sum(message.weight for message in by_rank),
            full_weight=sum(message.full_weight for message in by_rank),
            num_skipped=sum(message.num_skipped for message in by_rank),
            least=StepMessage(*map(min, fields)),
            greatest=StepMessage(*map(max, fields)),
            by_rank=by_rank,
        )


class StepExchange:
    """Exchanges messages with the other ranks, in one order.

    Every exchange is the same small collective between the hosts, whatever its kind. So a rank that has run out of data
    takes part in the next one even while the others take a step, and each of them learns where the others are, instead
    of waiting in different collectives for each other.

    What a signal handler sets here goes out with the next message, so that all ranks learn of it in the same step.
    `digest` and `batch_digest` go out with the next message of a step. `has_alert` is asked before each message whether
    it has to alert the others.
    """

    def __init__(self, collectives: Collectives, *, has_alert: Callable[[], bool] = lambda: False) -> None:
        self.epoch = 0
        self.num_batches = 0
        self.stop_signal = 0
        self.wants_requeue = False
        self.all_stop_by = 0
        self.all_requeue = False
        self.is_alerted = False  # by some rank; whoever acts on it resets it
        self._has_alert = has_alert
        self.digest = 0
        self.digests_differ = False  # whoever reads that resets it
        self.batch_digest = 0
        self.batch_digests: list[int] = []  # those that have come in, by rank
        self.global_ranks = collectives.global_ranks  # by rank in the messages: the rank in the run
        self._hosts: Collectives | None = collectives.host_group()
        self._in_flight: deque[PendingGather] = deque()
        self._newest = CombinedMessages()

    def send(self, kind: MessageKind, **fields: Any) -> None:
        """Send a message with these `fields` to all ranks; `receive` returns what theirs come to."""
        digest = batch_digest = 0
        if kind == MessageKind.STEP:
            digest, self.digest = self.digest, 0
            batch_digest, self.batch_digest = self.batch_digest, 0
        assert self._hosts is not None  # not closed yet
        message = StepMessage(
            kind=kind,
            epoch=self.epoch,
            num_batches=self.num_batches,
            stop_signal=self.stop_signal,
            wants_requeue=self.wants_requeue,
            is_alert=self._has_alert(),
            digest=digest,
            batch_digest=batch_digest,
            **fields,
        )
        self._in_flight.append(self._hosts.start_gather(torch.tensor(astuple(message), dtype=torch.float64)))

    def receive(self) -> CombinedMessages:
        """Return what the newest messages come to. Raises if the ranks are at different places of the loop."""
        while self._in_flight:
            self._newest = self._take_next()
        newest, self._newest = self._newest, CombinedMessages()
        return newest

    def compare(self, value: int) -> bool:
        """Return whether all ranks give the same `value`, which is at most 2**48. Raises like `receive`."""
        self.send(MessageKind.COMPARISON, weight=value)
        while len(self._in_flight) > 1:
            self._newest = self._take_next()  # for `receive`
        compared = self._take_next()
        return compared.least.weight == compared.greatest.weight

    def close(self) -> bool:
        """Exchange no more messages; return whether none is under way, so that the connections may be closed."""
        is_quiet = all(exchange.work.is_completed() for exchange in self._in_flight)
        self._in_flight.clear()
        self._hosts = None
        return is_quiet

    def _take_next(self) -> CombinedMessages:
        sent = self._in_flight.popleft().wait()
        combined = CombinedMessages.of([StepMessage.from_floats(numbers.tolist()) for numbers in sent])
        least, greatest = combined.least, combined.greatest
        if (least.kind, least.epoch) != (greatest.kind, greatest.epoch):
            raise OutOfStepError(_explain(dict(zip(self.global_ranks, combined.by_rank, strict=True))))
        self.all_stop_by = self.all_stop_by or greatest.stop_signal
        self.all_requeue = self.all_requeue or greatest.wants_requeue
        self.is_alerted |= greatest.is_alert
        self.digests_differ |= least.digest != greatest.digest
        if greatest.batch_digest:
            self.batch_digests = [message.batch_digest for message in combined.by_rank]
        return combined


def _explain(messages: Mapping[int, StepMessage]) -> str:
    last = min(message.epoch for message in messages.values())
    # A rank in a later epoch has finished this one, too.
    stopped = [rank for rank, m in messages.items() if m.kind == MessageKind.OUT_OF_DATA or m.epoch > last]
    training = [rank for rank in messages if rank not in stopped]
    remedy = (
        "Give every rank the same number of batches, or pass `uneven_data=True` to the strategy: a rank that has run"
        " out then takes part with weight zero until all have."
    )
    if not stopped or not training:
        where = ", ".join(f"rank {r}: {m.kind.name} in epoch {m.epoch}" for r, m in messages.items())
        return f"The ranks have lost step with each other ({where}). {remedy}"
    goes_on = f"{list_ranks(training)} {'goes' if len(training) == 1 else 'go'} on"
    return (
        f"{list_ranks(stopped).capitalize()} {'has' if len(stopped) == 1 else 'have'} no more data in epoch {last},"
        f" while {goes_on} after {messages[training[0]].num_batches} batches. {remedy}"
    )
