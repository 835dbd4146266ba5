"""From gradients to averaged gradients: hooks, plans, and where a backward begins and ends.

Note: first backward
    The first synchronised backward launches nothing. It records in which order gradients arrive and how often each
    hook fires; when it ends the plan is made in the order that rank 0 saw. The same happens for each further set of
    trainable parameters.

Note: one rank
    A rank that is alone has nothing to exchange. Unless something is to be done with its gradients all the same, it has
    no hooks, no buckets and no copies of gradients.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

from lightning_bucketddp.config import MIB, REDUCE_DTYPES, ReducerConfig
from lightning_bucketddp.planning.backward_profile import Profile
from lightning_bucketddp.planning.plan import ParameterSpec
from lightning_bucketddp.reducer.backward_pass import Alive, BackwardPass
from lightning_bucketddp.reducer.bucket import late_gradient
from lightning_bucketddp.reducer.bucket_set import BucketSet
from lightning_bucketddp.reducer.clock import Clock
from lightning_bucketddp.reducer.grad_hooks import GradientHooks, take_over
from lightning_bucketddp.reducer.graphs import is_being_captured
from lightning_bucketddp.reducer.launch_queue import LaunchQueue
from lightning_bucketddp.reducer.nonfinite import Finiteness
from lightning_bucketddp.reducer.plan_cache import PlanCache
from lightning_bucketddp.reducer.profiling import phase
from lightning_bucketddp.reducer.stats import ReducerStats
from lightning_bucketddp.reducer.weighting import Weighting
from lightning_bucketddp.reducer.wire import CommHookReduction, MeanReduction, Reduction
from lightning_bucketddp.replicas.replicas import Replicas

if TYPE_CHECKING:
    from lightning_bucketddp.reducer.step_recorder import StepRecorder

log = logging.getLogger(__name__)


class Reducer:
    """Averages the gradients of a module over the ranks while backward runs.

    Args:
        replicas: the module's parameters; the caller has made the ranks agree on them.
        config: what the user set.
        weighting: how much each rank counts; None: all count the same, always.
        finiteness: looks for what is not finite; None: as `config` says.
        clock: what time is measured by for `bucket_cap_mb="auto"`; None: that of the parameters' device.
        say: tells the user on rank 0, in one line, what `bucket_cap_mb="auto"` has decided.
    """

    def __init__(
        self,
        replicas: Replicas,
        config: ReducerConfig,
        *,
        weighting: Weighting | None = None,
        finiteness: Finiteness | None = None,
        clock: Clock | None = None,
        say: Callable[[str], None] = log.info,
    ) -> None:
        replicas.check_trainable()
        self.stats = ReducerStats()
        self.finiteness = finiteness or Finiteness(replicas, config)
        self.bucket_set: BucketSet | None = None
        # Set while a step is recorded.
        self.recorder: StepRecorder | None = None
        self.replicas = replicas
        self._config = config
        self._weighting = weighting
        self._collectives = replicas.collectives
        self._params = list(replicas.parameters.values())
        self._reduction: Reduction = (
            MeanReduction(self._collectives, dtype=REDUCE_DTYPES.get(config.reduce_dtype or ""))
            if config.comm_hook is None
            else CommHookReduction(self._collectives, config.comm_hook, config.comm_state)
        )
        self._plan_cache = PlanCache(
            replicas, config, reduction=self._reduction, stats=self.stats, clock=clock, say=say
        )
        self._no_sync_depth = 0
        self._backward: BackwardPass | None = None
        self._exchanged: Any = (
            torch.Event(self._collectives.device) if self._collectives.device.type == "cuda" else None
        )
        self._is_passthrough = (
            self._collectives.world_size == 1
            and config.comm_hook is None
            and config.on_nonfinite == "warn"
            and weighting is None
        )
        take_over(replicas.parameters)
        self._hooks = GradientHooks([] if self._is_passthrough else self._params, self._act_on_gradient, self.close)

    def close(self) -> None:
        """Take the hooks off the parameters and let go of the buffers. Gradients stay where they are."""
        self._hooks.remove()
        self._plan_cache.close()
        self.bucket_set = None

    def describe(self) -> str:
        """What was planned and done so far, in one line."""
        stats = self.stats
        return (
            f"{self._plan_cache.description}; {stats.num_reductions} reductions in {stats.num_backwards} synchronised"
            f" backwards, {stats.bytes_reduced / MIB:.1f} MiB"
        )

    def describe_backward(self) -> str:
        """Which bucket a backward has come to, in words."""
        reductions = None if self._backward is None else self._backward.reductions
        return "" if reductions is None else reductions.describe(self._plan_cache.specs)

    @property
    def specs(self) -> list[ParameterSpec]:
        """What plans know of each parameter; a plan's members are indices into this."""
        return self._plan_cache.specs

    @property
    def profile(self) -> Profile | None:
        """What was measured for `bucket_cap_mb="auto"`, once that has been decided upon; on rank 0 only."""
        return self._plan_cache.profile

    @property
    def tuning(self) -> str:
        """What was tried and decided then, in words."""
        return self._plan_cache.tuning

    @property
    def has_exchanged(self) -> bool:
        """Whether the gradients of the last backward that ended are final on the device, too."""
        return self._exchanged is None or bool(self._exchanged.query())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate on this rank only. What counts is where backward runs, not forward."""
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside, one backward runs; afterwards its gradients are final, even if no parameter took part in it.

        An exception inside does not keep this rank from the collectives that the others are waiting in.
        """
        if self._is_passthrough:
            self.finiteness.begin(self.stats)
            yield
            self._finish_alone()
            return
        backward = self._begin()
        try:
            yield
        finally:
            self._finish(backward)

    def _finish_alone(self) -> None:
        """Note: one rank."""
        if self._no_sync_depth == 0:
            self.stats.num_backwards += 1
            with torch.no_grad():
                self.finiteness.read_without_others(self.stats)

    def _act_on_gradient(self, index: int) -> None:
        """The gradient of this parameter is the first of all, or the last of its bucket, or there is no plan."""
        backward = self._backward
        if backward is None or backward.died:
            backward = self._begin_from_hook()
            if not self._hooks.completes(index):
                return
        bucket_set = backward.bucket_set
        if bucket_set is None:
            self._observe(index, backward)
            return
        bucket_index = bucket_set.index_of_bucket[index]
        bucket = bucket_set.buckets[bucket_index]
        if bucket.arrivals.launched:
            raise late_gradient(self._plan_cache.specs[index].name, bucket=bucket_index, rank=self._collectives.rank)
        if backward.reductions is None:
            # Later micro-batches then accumulate into the buffer: no copy, and no second set of gradients.
            bucket.collect()
            return
        if backward.recorder is not None:
            backward.recorder.see_ready(bucket_index)
        if self._config.overlap and backward.reductions.next_to_launch == bucket_index:
            backward.reductions.launch_complete()

    def _begin(self) -> BackwardPass:
        if self._backward is not None:
            self._finish(self._backward, died=True)
        self.finiteness.begin(self.stats)
        trainable = tuple([param.requires_grad for param in self._params])
        syncs = self._no_sync_depth == 0
        factor = None
        if self._weighting is not None and self._weighting.begin(self._params, syncs=syncs, trainable=trainable):
            factor = self._factor(trainable)
        if self._plan_cache.will_change(trainable):
            # Not both at once, old buffers and new ones: there may be no memory for that.
            self.bucket_set = None
            self._hooks.begin(None)
        bucket_set = self._plan_cache.bucket_set(trainable)
        self._hooks.begin(bucket_set)
        recorder = (
            self.recorder if syncs and self.recorder and not is_being_captured(self._collectives.device) else None
        )
        reductions = self._reductions(bucket_set, recorder) if syncs and bucket_set is not None else None
        tuner = self._plan_cache.tuner(trainable) if syncs else None
        self._backward = BackwardPass(trainable, syncs, reductions, bucket_set, factor, tuner, recorder)
        if tuner is not None:
            tuner.begin()
        return self._backward

    def _begin_from_hook(self) -> BackwardPass:
        if self._weighting is not None:
            self._weighting.refuse_unweighted()
        backward = self._begin()
        alive = Alive()

        def on_end(_token: object) -> None:
            if self._backward is backward:  # it died
                self._hooks.rest()

        backward.alive = weakref.ref(alive, on_end)

        def at_end_of_backward(_held_by_the_engine: Alive = alive) -> None:
            self._finish(backward)

        Variable._execution_engine.queue_callback(at_end_of_backward)
        return backward

    def _observe(self, param_index: int, backward: BackwardPass) -> None:
        backward.arrived.append(param_index)
        if self._collectives.device.type == "cuda":
            backward.streams.add(torch.cuda.current_stream(self._collectives.device))

    def _finish(self, backward: BackwardPass, *, died: bool = False) -> None:
        """Do what is left of a backward, with all ranks. After one that `died` here, others may be waiting in it."""
        self._backward = None
        self._hooks.rest()
        if not backward.syncs:
            return
        # The times of a backward that died say nothing, and nobody uses its gradients.
        tuner, recorder = None if died else backward.tuner, backward.recorder
        if tuner is not None:
            tuner.backward_ended()
        if recorder is not None:
            recorder.begin_waiting()
        # First of all: it raises, before anything waits in vain, if some rank is not in this backward.
        factor = self._factor(backward.trainable) if backward.factor is None else backward.factor
        if not any(backward.trainable):
            if recorder is not None:
                recorder.end_waiting()
            return
        with torch.no_grad(), phase("bucketddp::finish"):
            reductions = backward.reductions or self._first_reductions(backward)
            if died:
                reductions.abandon()
            else:
                reductions.launch_rest()
                reductions.wait(factor=factor)
            if tuner is not None:
                tuner.reduced()
            if recorder is not None:
                recorder.end_waiting()
            if self._weighting is not None:
                self._weighting.end()
            if self._config.broadcast_buffers:
                self.replicas.broadcast_buffers()
        self.bucket_set = backward.bucket_set
        self.stats.num_backwards += 1
        if self._exchanged is not None and not is_being_captured(self._collectives.device):
            self._exchanged.record()
        assert self.bucket_set is not None  # there were reductions
        with torch.no_grad():
            if not died:
                self.finiteness.read(self.bucket_set, self.stats)
            if backward.tuner is not None:
                self._plan_cache.end(backward.trainable)

    def _factor(self, trainable: tuple[bool, ...]) -> float:
        if self._weighting is None:
            return 1.0
        factor = self._weighting.factor(self.stats)
        if self._weighting.trainable_differs:
            self.replicas.refuse_trainable(trainable)
        return factor

    def _first_reductions(self, backward: BackwardPass) -> LaunchQueue:
        backward.bucket_set = self._plan_cache.make(backward)
        return self._reductions(backward.bucket_set, backward.recorder)

    def _reductions(self, bucket_set: BucketSet, recorder: StepRecorder | None) -> LaunchQueue:
        return LaunchQueue(
            bucket_set,
            reduction=self._reduction,
            collectives=self._collectives,
            finiteness=self.finiteness,
            stats=self.stats,
            recorder=recorder,
        )
