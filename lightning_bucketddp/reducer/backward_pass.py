"""What belongs to one backward, and how it ends.

Note: failed backwards
    When a backward raises on a rank, nobody may step: the others have gradients in which that rank's are missing. So it
    does not take part in what is left of the exchange, and the others, who wait for it, learn why. Whoever marks a
    backward sees to that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_bucketddp.reducer.bucket_set import BucketSet
from lightning_bucketddp.reducer.graphs import is_being_captured
from lightning_bucketddp.reducer.launch_queue import LaunchQueue
from lightning_bucketddp.reducer.nonfinite import Finiteness
from lightning_bucketddp.reducer.observer import BackwardObserver, ReducerStats, profiler_span
from lightning_bucketddp.reducer.plan_cache import PlanCache
from lightning_bucketddp.reducer.weighting import Weighting
from lightning_bucketddp.replicas.replicas import Replicas


@dataclass(slots=True)
class BackwardPass:
    """Everything that belongs to one backward and dies with it.

    Attributes:
        trainable: by parameter.
        syncs: gradients are exchanged at its end, if not before.
        observer: is told what happens.
        is_tuned: it is one of those from which a better plan is computed.
        bucket_set: None: there is no plan yet.
        queue: None: nothing is launched before the end.
        factor: what the mean is multiplied by; None: that is known at the end.
        some_miss: all ranks compare what they miss when it ends.
        arrived: parameters whose gradients arrived, as long as there is no plan.
        streams: on which they did.
    """

    trainable: tuple[bool, ...]
    syncs: bool
    observer: BackwardObserver
    is_tuned: bool = False
    bucket_set: BucketSet | None = None
    queue: LaunchQueue | None = None
    factor: float | None = None
    some_miss: bool = False
    arrived: list[int] = field(default_factory=list)
    streams: set[torch.cuda.Stream] = field(default_factory=set)


class BackwardEnd:
    """Makes the gradients of a backward final, with all ranks."""

    def __init__(
        self,
        replicas: Replicas,
        plan_cache: PlanCache,
        *,
        new_queue: Callable[..., LaunchQueue],
        weighting: Weighting | None,
        finiteness: Finiteness,
        stats: ReducerStats,
    ) -> None:
        self._replicas = replicas
        self._plan_cache = plan_cache
        self._new_queue = new_queue
        self._weighting = weighting
        self._finiteness = finiteness
        self._stats = stats
        self._device = replicas.collectives.device
        self._exchanged: Any = torch.Event(self._device) if self._device.type == "cuda" else None

    @property
    def has_exchanged(self) -> bool:
        """Whether the gradients of the last backward that ended are final on the device, too."""
        return self._exchanged is None or bool(self._exchanged.query())

    def factor(self, trainable: tuple[bool, ...]) -> float:
        """Return what the mean is multiplied by; raise if some rank is not in this backward, or trains other things."""
        if self._weighting is None:
            return 1.0
        factor = self._weighting.factor(self._stats)
        if self._weighting.trainable_differs:
            self._replicas.refuse_trainable(trainable)
        return factor

    def finish(self, backward: BackwardPass) -> None:
        """Do what is left of a synchronised backward that has ended well on this rank."""
        backward.observer.backward_ended()
        # First of all: it raises, before anything waits in vain, if some rank is not in this backward.
        factor = self.factor(backward.trainable) if backward.factor is None else backward.factor
        with torch.no_grad(), profiler_span("bucketddp::finish"):
            if any(backward.trainable):
                self._reduce_rest(backward, factor)
            if self._weighting is not None:
                self._weighting.end()
        backward.observer.gradients_final()
        if backward.bucket_set is None:
            return
        self._stats.num_backwards += 1
        if self._exchanged is not None and not is_being_captured(self._device):
            self._exchanged.record()
        with torch.no_grad():
            self._finiteness.read(backward.bucket_set, self._stats)
            if backward.is_tuned:
                self._plan_cache.end_backward(backward.trainable)

    def _reduce_rest(self, backward: BackwardPass, factor: float) -> None:
        if backward.queue is None:
            backward.bucket_set = self._plan_cache.make(backward.trainable, backward.arrived, backward.streams)
            backward.queue = self._new_queue(backward.bucket_set, observer=backward.observer)
        backward.queue.launch_rest()
        missing, some_miss = backward.queue.missing, backward.some_miss
        same = self._weighting is not None and self._weighting.compare_missing(missing, some_miss=some_miss)
        backward.queue.wait(factor=factor, all_miss_the_same=same)
