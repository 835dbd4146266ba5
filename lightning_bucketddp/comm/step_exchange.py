"""Short messages that all ranks exchange in one order: what step each is at, and how much its gradients count.

Note: one exchange for all
    Every exchange is the same small collective between the hosts, whatever its kind. So a rank that has run out of
    data takes part in the next one even while the others take a step, and each of them learns where the others are,
    instead of waiting in different collectives for each other.

    It is hidden behind the backward, so a plain gather is fast enough for any number of ranks.
"""

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
    """What a rank tells the others.

    Attributes:
        kind: why it is sent.
        epoch: the epoch that the rank is in.
        num_batches: the batches that it has begun in this epoch.
        weight: how much its gradients count; for a fetch, whether it has a batch; or the weight of its first batch;
            or the number that is compared.
        full_weight: how much they would count if no step had been skipped.
        num_skipped: the steps that it has skipped.
        stop_signal: the signal that it has received, by which all shall stop; 0: none.
        wants_requeue: it has been told to save and to have the job queued again.
        is_alert: something has gone wrong there that all ranks have to hear of before their next step.
        trainable: identifies its set of trainable parameters.
        digest: of its weights and optimizer state, in the step in which they are compared; else 0.
        batch_digest: of the batches of the step, as long as the first ones are compared; else 0.
        num_missing: the gradients that it did not have in its last backward.
    """

    kind: MessageKind = MessageKind.STEP
    epoch: int = 0
    num_batches: int = 0
    weight: float = 0.0
    full_weight: float = 0.0
    num_skipped: int = 0
    stop_signal: int = 0
    wants_requeue: bool = False
    is_alert: bool = False
    trainable: int = 0
    digest: int = 0
    batch_digest: int = 0
    num_missing: int = 0

    @classmethod
    def from_floats(cls, values: Sequence[float]) -> StepMessage:
        """Return the message that has travelled as a tensor of `values`, one for each field."""
        types: tuple[type[Any], ...] = (MessageKind, int, int, float, float, int, int, bool, bool, *[int] * 4)
        return cls(*[convert(value) for convert, value in zip(types, values, strict=True)])


@dataclass(frozen=True, slots=True)
class CombinedMessages:
    """What the messages of all ranks come to.

    Attributes:
        weight: the sum over the ranks.
        full_weight: the sum over the ranks.
        num_skipped: the sum over the ranks.
        least: the least value of each field.
        greatest: the greatest value of each field.
        by_rank: all messages.
    """

    weight: float = 0.0
    full_weight: float = 0.0
    num_skipped: int = 0
    least: StepMessage = StepMessage()
    greatest: StepMessage = StepMessage()
    by_rank: Sequence[StepMessage] = ()

    @classmethod
    def of(cls, by_rank: Sequence[StepMessage]) -> CombinedMessages:
        """Return what these messages come to."""
        fields = list(zip(*map(astuple, by_rank), strict=True))
        return cls(
            weight=sum(message.weight for message in by_rank),
            full_weight=sum(message.full_weight for message in by_rank),
            num_skipped=sum(message.num_skipped for message in by_rank),
            least=StepMessage(*map(min, fields)),
            greatest=StepMessage(*map(max, fields)),
            by_rank=by_rank,
        )

    @property
    def are_in_step(self) -> bool:
        """Return whether all ranks are at the same place of the loop."""
        return (self.least.kind, self.least.epoch) == (self.greatest.kind, self.greatest.epoch)


@dataclass(slots=True)
class PendingComparison:
    """A comparison of a number of every rank, in flight."""

    _take_next: Callable[[], None]
    _is_equal: bool | None = None

    def wait(self) -> bool:
        """Return whether all ranks have given the same number. Raises if they are at different places of the loop."""
        while self._is_equal is None:
            self._take_next()
        return self._is_equal

    def set(self, is_equal: bool) -> None:
        """Set what `wait` returns."""
        self._is_equal = is_equal


@dataclass(frozen=True, slots=True)
class _InFlight:
    pending: PendingGather
    comparison: PendingComparison | None = None


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
        # By rank in the messages: the rank in the run.
        self.global_ranks = collectives.global_ranks
        self._hosts: Collectives | None = collectives.host_group()
        self._in_flight: deque[_InFlight] = deque()
        self._newest = CombinedMessages()

    def send(
        self,
        kind: MessageKind,
        *,
        weight: float = 0.0,
        full_weight: float = 0.0,
        num_skipped: int = 0,
        trainable: int = 0,
        num_missing: int = 0,
    ) -> None:
        """Send a message to all ranks; `receive` returns what theirs come to."""
        digest = batch_digest = 0
        if kind == MessageKind.STEP:
            digest, self.digest = self.digest, 0
            batch_digest, self.batch_digest = self.batch_digest, 0
        self._start(
            kind,
            weight=weight,
            full_weight=full_weight,
            num_skipped=num_skipped,
            trainable=trainable,
            digest=digest,
            batch_digest=batch_digest,
            num_missing=num_missing,
        )

    def receive(self) -> CombinedMessages:
        """Return what the newest messages come to. Raises if the ranks are at different places of the loop."""
        while self._in_flight:
            self._take_next()
        newest, self._newest = self._newest, CombinedMessages()
        return newest

    def start_comparison(self, value: int) -> PendingComparison:
        """Start to compare `value`, which is at most 2**48, with the other ranks', who do so at the same place."""
        comparison = PendingComparison(self._take_next)
        self._start(MessageKind.COMPARISON, comparison, weight=value)
        return comparison

    def close(self) -> bool:
        """Exchange no more messages; return whether none is under way, so that the connections may be closed."""
        is_quiet = all(exchange.pending.has_arrived for exchange in self._in_flight)
        self._in_flight.clear()
        self._hosts = None
        return is_quiet

    def _start(self, kind: MessageKind, comparison: PendingComparison | None = None, **fields: Any) -> None:
        assert self._hosts is not None  # not closed yet
        flags: dict[str, Any] = {"stop_signal": self.stop_signal, "wants_requeue": self.wants_requeue}
        message = StepMessage(kind, self.epoch, self.num_batches, is_alert=self._has_alert(), **flags, **fields)
        numbers = torch.tensor(astuple(message), dtype=torch.float64)
        self._in_flight.append(_InFlight(self._hosts.start_gather(numbers), comparison))

    def _take_next(self) -> None:
        exchange = self._in_flight.popleft()
        combined = CombinedMessages.of([StepMessage.from_floats(sent.tolist()) for sent in exchange.pending.wait()])
        least, greatest = combined.least, combined.greatest
        if not combined.are_in_step:
            raise OutOfStepError(_explain(dict(zip(self.global_ranks, combined.by_rank, strict=True))))
        self.all_stop_by = self.all_stop_by or greatest.stop_signal
        self.all_requeue = self.all_requeue or greatest.wants_requeue
        self.is_alerted |= greatest.is_alert
        self.digests_differ |= least.digest != greatest.digest
        if greatest.batch_digest:
            self.batch_digests = [message.batch_digest for message in combined.by_rank]
        if exchange.comparison is None:
            self._newest = combined
        else:
            exchange.comparison.set(least.weight == greatest.weight)


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
