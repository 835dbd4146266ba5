"""Short messages that all ranks exchange in one order: what step each is at, and how much its gradients count.

Losses are multiplied by the weights of their micro-batches before backward, the reduction takes the plain mean over the
ranks, and all ranks exchange the sums of their weights while backward runs: one factor per step makes that mean the
weighted one, over all ranks and micro-batches. It is exactly 1 if no rank weighs or skips. It is for the gradients of
this step alone: what an earlier backward has made final (two losses, one after the other) is put aside meanwhile.

Note: one set of trainable parameters
    Buckets of different sets must not be reduced together: gloo ends the process, NCCL waits or adds up what does not
    belong together. Each rank sends its set when a backward begins and reads those of the others when it ends, or at
    once if its own has changed. So a rank whose set has changed alone launches nothing, and all learn of it in time.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


class StepMessage(NamedTuple):
    """What a rank sends to the others."""

    kind: MessageKind = MessageKind.STEP
    epoch: int = 0
    num_batches: int = 0  # begun in this epoch
    # How much its gradients count; for a fetch, whether it has a batch; or the weight of its first batch; or the number
    # that is compared.
    weight: float = 0.0
    full_weight: float = 0.0  # how much its gradients would count if no step had been skipped
    num_skipped: int = 0  # steps
    stop_signal: int = 0  # the signal that it has received, by which all shall stop; 0: none
    wants_requeue: bool = False  # it shall save, and have the job queued again
    is_alert: bool = False  # something has gone wrong there, which all ranks have to know before their next step
    trainable: int = 0  # identifies its set of trainable parameters
    digest: int = 0  # of its weights and optimizer state, in the step in which they are compared; else 0
    batch_digest: int = 0  # of the batches of the step, as long as the first ones are compared; else 0
    num_missing: int = 0  # the gradients that it did not have in its last backward


# A message is sent as a tensor of floats, one for each field.
_TYPES: tuple[type[Any], ...] = (MessageKind, int, int, float, float, int, int, bool, bool, *[int] * 4)


class CombinedMessages(NamedTuple):
    """The messages of all ranks: the sum, the least and the greatest value of each field."""

    total: StepMessage = StepMessage()
    least: StepMessage = StepMessage()
    greatest: StepMessage = StepMessage()
    by_rank: Sequence[StepMessage] = ()

    @classmethod
    def of(cls, by_rank: Sequence[StepMessage]) -> CombinedMessages:
        fields = list(zip(*by_rank, strict=True))
        total, least, greatest = (StepMessage._make(map(combine, fields)) for combine in (sum, min, max))
        return cls(total, least, greatest, by_rank)


class StepExchange:
    """Exchanges messages with the other ranks, in one order.

    Every exchange is the same small collective between the hosts, whatever its kind. So a rank that has run out of data
    takes part in the next one even while the others take a step, and each of them learns where the others are, instead
    of waiting in different collectives for each other.

    What a signal handler sets here is sent with the next message, so that all ranks learn of it in the same step.
    `digest` and `batch_digest` are sent with the next message of a step. `has_alert` is called before each message.
    """

    def __init__(self, collectives: Collectives, *, has_alert: Callable[[], bool] = lambda: False) -> None:
        self.epoch = 0
        self.num_batches = 0
        self.stop_signal = 0
        self.wants_requeue = False
        self.all_stop_by = 0
        self.all_requeue = False
        self.is_alerted = False  # by some rank; reset by the reader
        self._has_alert = has_alert
        self.digest = 0
        self.digests_differ = False  # reset by the reader
        self.batch_digest = 0
        self.batch_digests: list[int] = []  # received, by rank
        self.global_ranks = collectives.global_ranks  # by rank in the messages: the rank in the run
        self._hosts: Collectives | None = collectives.host_group()
        self._in_flight: deque[PendingGather] = deque()
        self._newest = CombinedMessages()

    def send(self, kind: MessageKind, **fields: Any) -> None:
        """Send a message with these `fields` to all ranks; `receive` returns those of all."""
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
        self._in_flight.append(self._hosts.start_gather(torch.tensor(message, dtype=torch.float64)))

    def receive(self) -> CombinedMessages:
        """Return the newest messages. Raises if the ranks are at different places of the loop."""
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
        by_rank = [values.tolist() for values in self._in_flight.popleft().wait()]
        messages = [StepMessage(*[kind(x) for kind, x in zip(_TYPES, values, strict=True)]) for values in by_rank]
        combined = CombinedMessages.of(messages)
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


@dataclass(eq=False)
class Weighting:
    """Collects the weights of this rank's micro-batches, and agrees with the other ranks on the factor of a step."""

    exchange: StepExchange
    # The mean is over all weight there is, whatever the number of micro-batches. Otherwise each micro-batch is meant to
    # have weight one, and only what falls short of that is made up for.
    by_weight: bool
    nobody_contributed: bool = False  # to the gradients of a step, which may be those of several backwards
    has_stepped: bool = True  # since the last synchronised backward; set by the caller that takes the step
    trainable_differs: bool = False
    some_miss: bool = False  # whether a rank has missed a gradient in the backward before the last
    _num_missing: int = 0
    _trainable: tuple[bool, ...] | None = None
    _trainable_id: int = 0
    _weights: list[float] = field(default_factory=list)
    _num_skipped: int = 0
    _adds_nothing: bool = False  # any rank, to the last backward
    # What gradients were before the first micro-batch, where that may be needed.
    _put_aside: list[tuple[Tensor, Tensor]] | None = None

    def add(self, weight: float, *, skipped: bool = False) -> None:
        """Add the weight of the micro-batch whose backward comes next."""
        self._weights.append(weight)
        self._num_skipped += skipped

    def forget(self) -> None:
        """Drop the weights of a step that does not end, and what was put aside for it."""
        self._weights.clear()
        self._num_skipped = 0
        self._put_aside = None

    def looks_at_earlier(self, *, syncs: bool) -> bool:
        """Return whether the backward that comes next depends on what gradients were before it."""
        return self.by_weight or not syncs or sum(self._weights) < len(self._weights)

    def begin(self, params: Sequence[Tensor], *, syncs: bool, trainable: tuple[bool, ...]) -> bool:
        """Send the weight of this rank's gradients to the others, if the backward synchronises.

        Return whether the set has changed: then `factor` must be called before anything is launched (Note: one set of
        trainable parameters).
        """
        looks_at_earlier = self.looks_at_earlier(syncs=syncs)
        trained = [param for param, trains in zip(params, trainable, strict=True) if trains] if looks_at_earlier else []
        if self._put_aside is None and looks_at_earlier:
            # Not of others: they stay as they are, and a divided gradient could not be read.
            self._put_aside = [(param, param.grad.clone()) for param in trained if param.grad is not None]
            for param, _ in self._put_aside if self.by_weight else ():
                zero_in_place(param.grad)  # type: ignore[arg-type]  # it may be the program's
        has_changed = syncs and trainable != self._trainable
        if has_changed:
            self._trainable = trainable
            self._trainable_id = id_of(bytes(trainable))
        if syncs and not self.by_weight and sum(self._weights) < len(self._weights):
            # `factor` makes up for what this rank lacks, also in what gradients were before: it has less of that.
            ids = set(map(id, trained))
            self._put_aside = [kept for kept in self._put_aside or () if id(kept[0]) in ids]
            for param, earlier in self._put_aside:
                if param.grad is not None:
                    param.grad.sub_(earlier, alpha=1 - sum(self._weights) / len(self._weights))
        if syncs:
            self.exchange.send(
                MessageKind.STEP,
                weight=sum(self._weights),
                full_weight=bool(self._weights) if self.by_weight else len(self._weights),
                num_skipped=self._num_skipped,
                trainable=self._trainable_id,
                num_missing=self._num_missing,
            )
            self._weights.clear()
            self._num_skipped = 0
        return has_changed

    def factor(self) -> tuple[float, int]:
        """Return what the plain mean over the ranks has to be multiplied by, and how many steps they have skipped."""
        received = self.exchange.receive()
        self.some_miss = received.greatest.num_missing > 0
        self.trainable_differs = received.least.trainable != received.greatest.trainable
        total = received.total
        self._adds_nothing = total.weight == 0 and total.full_weight > 0
        self.nobody_contributed = self._adds_nothing and (self.has_stepped or self.nobody_contributed)
        self.has_stepped = False
        return total.full_weight / total.weight if total.weight > 0 else 1.0, total.num_skipped

    def compare_missing(self, missing: Collection[int], *, some_miss: bool) -> bool:
        """Return whether all ranks are known to miss the gradients of the same parameters, in a backward that ends.

        All ranks call it with the same `some_miss`: what that was when the backward began.
        """
        self._num_missing = len(missing)
        if not some_miss:
            return False  # else host to host: reading the used-flags would wait for all that the device has to do
        return self.exchange.compare(id_of(repr(sorted(missing)).encode()))

    def end(self) -> None:
        """Add what was put aside: the gradients of the step are final."""
        for param, earlier in self._put_aside or () if self.by_weight or self._adds_nothing else ():
            param.grad = earlier if param.grad is None else param.grad.add_(earlier)
        self._put_aside = None


def zero_in_place(gradient: Tensor) -> None:
    # Without its graph, if it has one. A sparse one has none, and detached it would not share what `zero_` changes.
    (gradient if gradient.is_sparse else gradient.detach()).zero_()


def id_of(data: bytes) -> int:
    """Return a number of 48 bits, which a float holds exactly, for `data`."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big")
