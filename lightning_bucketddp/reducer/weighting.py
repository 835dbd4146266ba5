"""How much each rank's gradients count in the mean.

Losses are multiplied by the weights of their micro-batches before backward, the reduction takes the plain mean over the
ranks, and all ranks exchange the sums of their weights while backward runs: one factor per step makes that mean the
weighted one, over all ranks and micro-batches. It is exactly 1 when nobody weighs or skips. It is for the gradients of
this step alone: what an earlier backward has made final (two losses, one after the other) is put aside meanwhile.

Note: one set of trainable parameters
    Buckets of different sets must not meet: gloo ends the process, NCCL waits or adds up what does not belong together.
    Each rank tells its set when a backward begins and looks at the others' when it ends, or at once if its own has
    changed. So a rank whose set has changed alone launches nothing, and all ranks learn of it before they wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_bucketddp.comm.step_exchange import MessageKind, StepExchange
from lightning_bucketddp.reducer.observer import ReducerStats


@dataclass(eq=False)
class Weighting:
    """Collects the weights of this rank's micro-batches, and agrees with the other ranks on the factor of a step."""

    exchange: StepExchange
    # The mean is over all weight there is, whatever the number of micro-batches. Otherwise each micro-batch is meant to
    # have weight one, and only what falls short of that is made up for.
    by_weight: bool
    nobody_contributed: bool = False
    trainable_differs: bool = False
    some_miss: bool = False  # whether a rank has missed a gradient in the backward before the last
    _num_missing: int = 0
    _trainable: tuple[bool, ...] | None = None
    _trainable_id: int = 0
    _weights: list[float] = field(default_factory=list)
    _num_skipped: int = 0
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

    def begin(self, params: Sequence[Tensor], *, syncs: bool, trainable: tuple[bool, ...]) -> bool:
        """Tell the other ranks, if the backward synchronises, what the gradients of this step weigh here.

        Return whether the set has changed: then `factor` must be asked for before anything is launched (Note: one set
        of trainable parameters).
        """
        if self.by_weight and self._put_aside is None:
            self._put_aside = [(param, param.grad.clone()) for param in params if param.grad is not None]
            for param, _ in self._put_aside:
                param.grad = None
        has_changed = syncs and trainable != self._trainable
        if has_changed:
            self._trainable = trainable
            self._trainable_id = _id_of(bytes(trainable))
        if syncs:
            full_weight = bool(self._weights) if self.by_weight else len(self._weights)
            self.exchange.send(
                MessageKind.STEP,
                weight=sum(self._weights),
                full_weight=full_weight,
                num_skipped=self._num_skipped,
                trainable=self._trainable_id,
                num_missing=self._num_missing,
            )
            self._weights.clear()
            self._num_skipped = 0
        return has_changed

    def factor(self, stats: ReducerStats) -> float:
        """Return what the plain mean over the ranks has to be multiplied by."""
        told = self.exchange.receive()
        self.some_miss = told.greatest.num_missing > 0
        self.trainable_differs = told.least.trainable != told.greatest.trainable
        stats.num_skipped += told.num_skipped
        self.nobody_contributed = told.weight == 0 and told.full_weight > 0
        return told.full_weight / told.weight if told.weight > 0 else 1.0

    def compare_missing(self, missing: Collection[int], *, some_miss: bool) -> bool:
        """Return whether all ranks are known to miss the gradients of the same parameters, in a backward that ends.

        All ranks call it with the same `some_miss`: what that was when the backward began.
        """
        self._num_missing = len(missing)
        if not some_miss:
            return False  # else host to host: reading the used-flags would wait for all that the device has to do
        return self.exchange.compare(_id_of(repr(sorted(missing)).encode()))

    def end(self) -> None:
        """Give back what was put aside: the gradients of the step are final."""
        for param, earlier in self._put_aside or ():
            param.grad = earlier if param.grad is None else param.grad.add_(earlier)
        self._put_aside = None


def _id_of(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big")
