"""How much each rank's gradients count in the mean.

Note: weighted mean
    Each micro-batch comes with a weight. What is wanted is the sum of the weighted gradients over the sum of the
    weights, over all ranks and all micro-batches of a step. Losses are multiplied by their weights before backward;
    the reduction takes the plain mean over the ranks; and because all ranks exchange the sums of their weights while
    backward runs, one factor per step makes that mean the weighted one. It is exactly 1 when nobody weighs or skips.

    The factor is for the gradients of this step alone. What an earlier backward has already made final (two losses,
    one after the other) is put aside meanwhile.

Note: one set of trainable parameters
    Buckets of different sets must not meet: gloo ends the process, NCCL waits or adds up what does not belong together.
    Each rank tells its set when a backward begins and looks at the others' when it ends, or at once if its own has
    changed. So a rank whose set has changed alone launches nothing, and all ranks learn of it before they wait.

Note: gradients that all ranks miss
    A parameter that was used on no rank keeps its `.grad`. The device knows that from the used-flags, and asking it
    takes the host as long as all that the device has still to do. So when some rank has missed a gradient, all ranks
    compare in the next backwards what they miss, host to host, and only where that differs is the device asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

from lightning_bucketddp.comm.step_exchange import MessageKind, StepExchange
from lightning_bucketddp.reducer.observer import ReducerStats


class Weighting:
    """Collects the weights of this rank's micro-batches, and agrees with the other ranks on the factor of a step.

    Args:
        by_weight: the mean is over all weight there is, whatever the number of micro-batches. Otherwise each
            micro-batch is meant to have weight one, and only what falls short of that is made up for.
    """

    def __init__(self, exchange: StepExchange, *, by_weight: bool) -> None:
        self.nobody_contributed = False
        self.trainable_differs = False
        # Whether a rank has missed a gradient in the backward before the last.
        self.some_miss = False
        self._num_missing = 0
        self._trainable: tuple[bool, ...] | None = None
        self._trainable_id = 0
        self._exchange = exchange
        self._by_weight = by_weight
        self._weights: list[float] = []
        self._num_skipped = 0
        self._put_aside: list[tuple[Tensor, Tensor]] | None = None

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

        Return whether the set has changed: `factor` must be asked for then before anything is launched (Note: one set
        of trainable parameters).
        """
        if self._by_weight and self._put_aside is None:
            self._put_aside = [(param, param.grad.clone()) for param in params if param.grad is not None]
            for param, _ in self._put_aside:
                param.grad = None
        has_changed = syncs and trainable != self._trainable
        if has_changed:
            self._trainable = trainable
            self._trainable_id = _id_of(bytes(trainable))
        if syncs:
            full_weight = bool(self._weights) if self._by_weight else len(self._weights)
            self._exchange.send(
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
        told = self._exchange.receive()
        self.some_miss = told.greatest.num_missing > 0
        self.trainable_differs = told.least.trainable != told.greatest.trainable
        stats.num_skipped += told.num_skipped
        self.nobody_contributed = told.weight == 0 and told.full_weight > 0
        return told.full_weight / told.weight if told.weight > 0 else 1.0

    def compare_missing(self, missing: Sequence[int], *, some_miss: bool) -> bool:
        """Return whether all ranks are known to miss the gradients of the same parameters, in a backward that ends.

        All ranks call it with the same `some_miss`: what that was when the backward began.
        """
        self._num_missing = len(missing)
        if not some_miss:
            return False
        return self._exchange.start_comparison(_id_of(repr(sorted(missing)).encode())).wait()

    def end(self) -> None:
        """Give back what was put aside: the gradients of the step are final."""
        for param, earlier in self._put_aside or ():
            param.grad = earlier if param.grad is None else param.grad.add_(earlier)
        self._put_aside = None


def _id_of(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big")
