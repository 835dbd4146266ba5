"""What belongs to one backward, and how it ends.

Note: scope of a backward
    `Reducer.backward()` marks one from outside. A backward that nobody marked (a plain `loss.backward()`) begins with
    its first hook and ends with a callback of the autograd engine. An exception inside it drops that callback, and
    with it the `Alive` token: that is how the next backward knows that the last one died, and how a hook inside a
    nested backward (reentrant checkpointing) knows that the outer one still runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_bucketddp.reducer.bucket_set import BucketSet
from lightning_bucketddp.reducer.foresight import NO_FORESIGHT, NoForesight
from lightning_bucketddp.reducer.graphs import is_being_captured
from lightning_bucketddp.reducer.launch_queue import LaunchQueue
from lightning_bucketddp.reducer.nonfinite import Finiteness
from lightning_bucketddp.reducer.observer import BackwardObserver, profiler_span
from lightning_bucketddp.reducer.plan_cache import PlanCache
from lightning_bucketddp.reducer.stats import ReducerStats
from lightning_bucketddp.reducer.weighting import EqualWeights
from lightning_bucketddp.replicas.replicas import Replicas


class Alive:
    """Held by the autograd engine as long as a backward runs, and by nobody else."""

    __slots__ = ("__weakref__",)


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
        foresight: tells which gradients will not come.
        alive: of a backward that nobody marked from outside (Note: scope of a backward).
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
    foresight: NoForesight = NO_FORESIGHT
    alive: weakref.ref[Alive] | None = None
    arrived: list[int] = field(default_factory=list)
    streams: set[torch.cuda.Stream] = field(default_factory=set)

    @property
    def died(self) -> bool:
        return self.alive is not None and self.alive() is None


class BackwardEnd:
    """Makes the gradients of a backward final, with all ranks."""

    def __init__(
        self,
        replicas: Replicas,
        plan_cache: PlanCache,
        *,
        new_queue: Callable[..., LaunchQueue],
        weighting: EqualWeights,
        finiteness: Finiteness,
        stats: ReducerStats,
        broadcast_buffers: bool,
    ) -> None:
        self._replicas = replicas
        self._plan_cache = plan_cache
        self._new_queue = new_queue
        self._weighting = weighting
        self._finiteness = finiteness
        self._stats = stats
        self._broadcast_buffers = broadcast_buffers
        self._device = replicas.collectives.device
        self._exchanged: Any = torch.Event(self._device) if self._device.type == "cuda" else None

    @property
    def has_exchanged(self) -> bool:
        """Whether the gradients of the last backward that ended are final on the device, too."""
        return self._exchanged is None or bool(self._exchanged.query())

    def factor(self, trainable: tuple[bool, ...]) -> float:
        """Return what the mean is multiplied by; raise if some rank is not in this backward, or trains other things."""
        factor = self._weighting.factor(self._stats)
        if self._weighting.trainable_differs:
            self._replicas.refuse_trainable(trainable)
        return factor

    def finish(self, backward: BackwardPass, *, died: bool) -> None:
        """Do what is left of a synchronised backward. After one that `died` here, others may be waiting in it."""
        backward.observer.backward_ended()
        # First of all: it raises, before anything waits in vain, if some rank is not in this backward.
        factor = self.factor(backward.trainable) if backward.factor is None else backward.factor
        if not any(backward.trainable):
            backward.observer.gradients_final()
            return
        with torch.no_grad(), profiler_span("bucketddp::finish"):
            self._reduce_rest(backward, factor, died=died)
        self._stats.num_backwards += 1
        if self._exchanged is not None and not is_being_captured(self._device):
            self._exchanged.record()
        assert backward.bucket_set is not None  # something was reduced
        with torch.no_grad():
            if not died:
                self._finiteness.read(backward.bucket_set, self._stats)
            if backward.is_tuned:
                self._plan_cache.end_backward(backward.trainable)

    def _reduce_rest(self, backward: BackwardPass, factor: float, *, died: bool) -> None:
        if backward.queue is None:
            backward.bucket_set = self._plan_cache.make(backward.trainable, backward.arrived, backward.streams)
            backward.queue = self._new_queue(backward.bucket_set, observer=backward.observer)
        assert backward.bucket_set is not None  # where there is a queue
        if died:
            backward.queue.abandon()
            self._weighting.compare_missing([], some_miss=backward.some_miss)  # for the other ranks' sake
            backward.observer.backward_abandoned()
        else:
            backward.queue.launch_rest()
            late = backward.queue.find_late()
            same = self._weighting.compare_missing(backward.queue.missing, some_miss=backward.some_miss)
            backward.foresight.verify(backward.queue.missing)
            backward.queue.wait(factor=factor, all_miss_the_same=same)
            backward.observer.gradients_final()
            if late is not None:
                raise self._plan_cache.late_gradient(backward.bucket_set.plan[late].members, late)
        self._weighting.end()
        if self._broadcast_buffers:
            self._replicas.broadcast_buffers()
