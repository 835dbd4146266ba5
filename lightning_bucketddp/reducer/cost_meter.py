"""What a reduction costs here, measured between two steps."""

from __future__ import annotations

import statistics

import torch

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import MIB
from lightning_bucketddp.planning.cost import AllReduceCost
from lightning_bucketddp.reducer.arrivals import Arrivals
from lightning_bucketddp.reducer.bucket import Bucket
from lightning_bucketddp.reducer.clock import Clock
from lightning_bucketddp.reducer.wire import Reduction

_SMALLEST_BYTES = 4096
_GROWTH = 8
# More would say nothing new about the bandwidth, and takes memory.
_LARGEST_BYTES = 16 * MIB
# A size that takes longer is the last: the next one would take eight times as long.
_SLOW_S = 0.01
_NUM_REPETITIONS = 5


class CostMeter:
    """Measures once what `reduction` costs, casts included. All ranks measure together.

    Args:
        reduction: what is done with each bucket.
        collectives: how to reach the other ranks.
        clock: what time is measured by.
    """

    def __init__(self, reduction: Reduction, *, collectives: Collectives, clock: Clock) -> None:
        self._reduction = reduction
        self._collectives = collectives
        self._clock = clock
        self._cost: AllReduceCost | None = None

    def measure(self, *, dtype: torch.dtype, module_bytes: int) -> AllReduceCost:
        """The cost for gradients of `dtype`, from sizes that such a module has."""
        if self._cost is None:
            seconds: dict[int, list[float]] = {}
            num_bytes, goes_on = _SMALLEST_BYTES, True
            while goes_on:
                seconds[num_bytes] = self._times(num_bytes, dtype)
                is_slow = statistics.median(seconds[num_bytes]) > _SLOW_S
                num_bytes *= _GROWTH
                is_enough = num_bytes > min(module_bytes, _LARGEST_BYTES) and len(seconds) > 1
                goes_on = self._collectives.broadcast_json(not (is_slow or is_enough))
            self._cost = AllReduceCost.fit(seconds)
        return self._cost

    def _times(self, num_bytes: int, dtype: torch.dtype) -> list[float]:
        members = [torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device="meta")]
        device = self._collectives.device
        bucket = Bucket(members, arrivals=Arrivals(0), num_flags=0, device=device, may_be_resized=False)
        marks = []
        for _ in range(1 + _NUM_REPETITIONS):
            start = self._clock.mark()
            self._reduction.start(bucket, index=0, is_last=False).wait()
            marks.append((start, self._clock.mark()))
        # The first one waits until all ranks are here.
        return [self._clock.seconds(start, stop) for start, stop in marks[1:]]
