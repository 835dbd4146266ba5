"""From gradients to averaged gradients: where a backward begins, and what each gradient leads to.

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
from functools import partial

import torch
from torch.autograd import Variable

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import MIB, REDUCE_DTYPES, ReducerConfig
from lightning_bucketddp.planning.backward_profile import Profile
from lightning_bucketddp.planning.plan import ParameterSpec
from lightning_bucketddp.reducer.backward_pass import Alive, BackwardEnd, BackwardPass
from lightning_bucketddp.reducer.bucket import Reduction
from lightning_bucketddp.reducer.bucket_set import BucketSet
from lightning_bucketddp.reducer.clock import Clock
from lightning_bucketddp.reducer.comm_hook import CommHookReduction
from lightning_bucketddp.reducer.foresight import NO_FORESIGHT, foresee
from lightning_bucketddp.reducer.grad_hooks import GradientHooks, take_over
from lightning_bucketddp.reducer.graphs import is_being_captured
from lightning_bucketddp.reducer.launch_queue import LaunchQueue
from lightning_bucketddp.reducer.nonfinite import Finiteness
from lightning_bucketddp.reducer.observer import NO_OBSERVER, BackwardObserver, all_of
from lightning_bucketddp.reducer.plan_cache import PlanCache
from lightning_bucketddp.reducer.quantized_reduction import QuantizedMeanReduction
from lightning_bucketddp.reducer.reduction import MeanReduction
from lightning_bucketddp.reducer.shards import Shards
from lightning_bucketddp.reducer.stats import ReducerStats
from lightning_bucketddp.reducer.weighting import EqualWeights
from lightning_bucketddp.replicas.replicas import Replicas

log = logging.getLogger(__name__)


class Reducer:
    """Averages the gradients of a module over the ranks while backward runs.

    Args:
        replicas: the module's parameters; the caller has made the ranks agree on them.
        shards: what optimizers divide among the ranks; None: nothing.
        finiteness: looks for what is not finite; None: as `config` says.
        clock: what time is measured by for `bucket_cap_mb="auto"`; None: that of the parameters' device.
        all_are_marked: each backward that concerns these parameters runs inside of `backward()`.
        say: tells the user on rank 0, in one line, what `bucket_cap_mb="auto"` has decided.
    """

    def __init__(
        self,
        replicas: Replicas,
        config: ReducerConfig,
        *,
        weighting: EqualWeights | None = None,
        shards: Shards | None = None,
        finiteness: Finiteness | None = None,
        clock: Clock | None = None,
        all_are_marked: bool = False,
        say: Callable[[str], None] = log.info,
    ) -> None:
        replicas.check_trainable()
        self.stats = ReducerStats()
        self.finiteness = finiteness or Finiteness(replicas, config)
        self.bucket_set: BucketSet | None = None
        # Another one is set while a step is recorded.
        self.observer: BackwardObserver = NO_OBSERVER
        self.replicas = replicas
        self._config = config
        self._weighting = weighting or EqualWeights()
        self._shards = shards
        self._collectives = replicas.collectives
        self._params = list(replicas.parameters.values())
        self._reduction = reduction = reduction_of(config, self._collectives)
        self._plan_cache = PlanCache(
            replicas, config, reduction=reduction, stats=self.stats, clock=clock, say=say, shards=shards
        )
        self._new_queue = partial(
            LaunchQueue,
            reduction=reduction,
            collectives=self._collectives,
            finiteness=self.finiteness,
            stats=self.stats,
        )
        self._end = BackwardEnd(
            replicas,
            self._plan_cache,
            new_queue=self._new_queue,
            weighting=self._weighting,
            finiteness=self.finiteness,
            stats=self.stats,
            broadcast_buffers=config.broadcast_buffers,
        )
        self._keeps_memory = False
        self._no_sync_depth = 0
        self._backward: BackwardPass | None = None
        self._is_passthrough = (
            self._collectives.world_size == 1
            and config.comm_hook is None
            and config.on_nonfinite == "warn"
            and weighting is None
        )
        take_over(replicas.parameters)
        # A divided gradient is a wrapper, and a communication hook may change the buffer: no version would tell.
        has_versions = shards is None and config.comm_hook is None
        self._hooks = GradientHooks(
            [] if self._is_passthrough else self._params,
            self._act_on_gradient,
            self.close,
            may_watch=all_are_marked and config.overlap and has_versions,
        )

    def close(self) -> None:
        """Take the hooks off the parameters and let go of the buffers. Gradients stay where they are."""
        self._hooks.remove()
        if self._shards is not None:
            self._shards.finish_gathering()
        self._plan_cache.close()
        self._reduction.close()
        self.bucket_set = None

    def describe(self) -> str:
        """Return what was planned and done so far, in one line."""
        stats = self.stats
        return (
            f"{self._plan_cache.description}; {stats.num_reductions} reductions in {stats.num_backwards} synchronised"
            f" backwards, {stats.bytes_reduced / MIB:.1f} MiB"
        )

    def describe_outlook(self) -> str:
        """Return what will be planned, before a backward has shown the order of gradients."""
        return self._plan_cache.describe_outlook()

    def describe_backward(self) -> str:
        """Return in words which bucket a backward has come to."""
        queue = None if self._backward is None else self._backward.queue
        return "" if queue is None else queue.describe(self._plan_cache.specs)

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
        """Whether the last exchanges, of gradients and of weights, have ended on the device, too."""
        return self._end.has_exchanged and (self._shards is None or self._shards.have_arrived)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only, in backwards that run inside; where forward ran does not matter."""
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    def give_back_memory(self) -> None:
        """Let go of buffers that no gradient is in: a forward, or a backward, begins (Note: memory between steps)."""
        if is_being_captured(self._collectives.device):
            self._keeps_memory = True  # what was captured goes on to use it
        if self.bucket_set is not None and not self._keeps_memory:
            self.bucket_set.give_back()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run one backward inside; afterwards its gradients are final, even if no parameter took part in it.

        An exception inside does not keep this rank from the collectives that the others are waiting in.
        """
        if self._is_passthrough:
            self.finiteness.begin(self.stats)
            yield
            self._finish_alone()
            return
        backward = self._begin(is_marked=True)
        try:
            yield
        finally:
            self._finish(backward)

    def _finish_alone(self) -> None:
        """End a backward of a rank that is alone (Note: one rank)."""
        if self._no_sync_depth == 0:
            self.stats.num_backwards += 1
            with torch.no_grad():
                self.finiteness.read_without_others(self.stats)

    def _act_on_gradient(self, index: int) -> None:
        """Handle a gradient that begins a backward or completes a bucket, or any as long as there is no plan."""
        backward = self._backward
        if backward is None or backward.died:
            backward = self._begin_from_hook(index)
            if not self._hooks.completes(index):
                return
        elif backward.foresight.is_due:
            backward.foresight.look()
            if not self._hooks.completes(index):
                return
        bucket_set = backward.bucket_set
        if bucket_set is None:
            self._see_arrival(index, backward)
            return
        bucket_index = bucket_set.index_of_bucket[index]
        bucket = bucket_set.buckets[bucket_index]
        if bucket.arrivals.launched:
            raise self._plan_cache.late_gradient([index], bucket_index)
        bucket.arrivals.last = index
        if backward.queue is None:
            # Later micro-batches then accumulate into the buffer: no copy, and no second set of gradients.
            if bucket.collect() and self._hooks.is_watching:
                self._hooks.stop_watching()
            return
        if self._hooks.is_watching and torch.is_grad_enabled():
            # It makes a graph of gradients, and adds to them out of place: no version would tell a late one.
            self._hooks.stop_watching()
        backward.observer.bucket_ready(bucket_index)
        if self._config.overlap and not backward.queue.launch_complete():
            self._hooks.stop_watching()

    def _begin(self, *, is_marked: bool) -> BackwardPass:
        if self._backward is not None:
            self._finish(self._backward, died=True)
        self.finiteness.begin(self.stats)
        self.give_back_memory()
        if self._shards is not None:
            self._shards.begin_backward()
        trainable = tuple([param.requires_grad for param in self._params])
        syncs = self._no_sync_depth == 0
        has_changed = self._weighting.begin(self._params, syncs=syncs, trainable=trainable)
        factor = self._end.factor(trainable) if has_changed else None
        if self._plan_cache.will_change(trainable):
            # Not both at once, old buffers and new ones: there may be no memory for that.
            self.bucket_set = None
            self._hooks.begin(None, may_watch=False, is_marked=is_marked)
        bucket_set = self._plan_cache.bucket_set(trainable)
        tuner = self._plan_cache.tuner(trainable) if syncs else None
        some_miss = syncs and self._weighting.some_miss
        self._hooks.begin(bucket_set, may_watch=tuner is None, is_marked=is_marked)
        is_recorded = syncs and self.observer is not NO_OBSERVER and not is_being_captured(self._collectives.device)
        observer = all_of(tuner, self.observer if is_recorded else None)
        queue = None
        if syncs and bucket_set is not None:
            queue = self._new_queue(bucket_set, observer=observer, finds_late=self._hooks.is_watching)
        foresight = NO_FORESIGHT
        if some_miss and is_marked and queue is not None and self._config.overlap and not self._hooks.is_watching:
            foresight = foresee(queue.bucket_set, self._hooks.nodes)
        if foresight.is_due:
            self._hooks.rest()  # so that the first gradient is acted on
        self._backward = BackwardPass(
            trainable,
            syncs,
            observer,
            is_tuned=tuner is not None,
            bucket_set=bucket_set,
            queue=queue,
            factor=factor,
            some_miss=some_miss,
            foresight=foresight,
        )
        observer.backward_began()
        return self._backward

    def _begin_from_hook(self, index: int) -> BackwardPass:
        self._weighting.refuse_unweighted()
        if self._shards is not None:
            self._shards.refuse_unmarked(self._params[index])
        backward = self._begin(is_marked=False)
        alive = Alive()

        def on_end(_token: object) -> None:
            if self._backward is backward:  # it died
                self._hooks.rest()

        backward.alive = weakref.ref(alive, on_end)

        def at_end_of_backward(_held_by_the_engine: Alive = alive) -> None:
            self._finish(backward)

        Variable._execution_engine.queue_callback(at_end_of_backward)
        return backward

    def _see_arrival(self, param_index: int, backward: BackwardPass) -> None:
        backward.arrived.append(param_index)
        if self._collectives.device.type == "cuda":
            backward.streams.add(torch.cuda.current_stream(self._collectives.device))

    def _finish(self, backward: BackwardPass, *, died: bool = False) -> None:
        self._backward = None
        self._hooks.rest()
        if backward.syncs:
            try:
                self._end.finish(backward, died=died)
            finally:
                self.bucket_set = backward.bucket_set or self.bucket_set


def reduction_of(config: ReducerConfig, collectives: Collectives) -> Reduction:
    """Return what takes means over the ranks of `collectives`, or has a communication hook do it."""
    if config.comm_hook is not None:
        return CommHookReduction(collectives, config.comm_hook, config.comm_state)
    dtype = REDUCE_DTYPES.get(config.reduce_dtype or "")
    if dtype != torch.int8:
        return MeanReduction(collectives, dtype=dtype)
    return QuantizedMeanReduction(collectives) if collectives.world_size > 1 else MeanReduction(collectives)
