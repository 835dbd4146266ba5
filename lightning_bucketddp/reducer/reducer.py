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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.process_group import ForeignCollectives
from lightning_bucketddp.config import MIB, REDUCE_DTYPES, ReducerConfig
from lightning_bucketddp.planning.cost import Profile
from lightning_bucketddp.planning.plan import ParameterSpec
from lightning_bucketddp.reducer.backward_pass import BackwardEnd, BackwardPass
from lightning_bucketddp.reducer.bucket import Reduction
from lightning_bucketddp.reducer.bucket_set import BucketMaker, BucketSet
from lightning_bucketddp.reducer.grad_hooks import GradientHooks, take_over
from lightning_bucketddp.reducer.graphs import is_being_captured
from lightning_bucketddp.reducer.launch_queue import LaunchQueue
from lightning_bucketddp.reducer.nonfinite import Finiteness
from lightning_bucketddp.reducer.observer import NO_OBSERVER, BackwardObserver, Clock, ReducerStats, all_of
from lightning_bucketddp.reducer.plan_cache import PlanCache
from lightning_bucketddp.reducer.quantization import QuantizedMeanReduction
from lightning_bucketddp.reducer.reduction import CommHookReduction, MeanReduction
from lightning_bucketddp.reducer.weighting import Weighting
from lightning_bucketddp.replicas.replicas import Replicas

log = logging.getLogger(__name__)


class Reducer:
    """Averages the gradients of a module over the ranks while backward runs.

    Args:
        replicas: the module's parameters; the caller has made the ranks agree on them.
        weighting: how much each rank counts in the mean; None: all count the same.
        maker: plans and makes buckets in our place; None: there is none.
        finiteness: looks for what is not finite; None: as `config` says.
        clock: what time is measured by for `bucket_cap_mb="auto"`; None: that of the parameters' device.
        say: tells the user on rank 0, in one line, what was decided.
    """

    def __init__(
        self,
        replicas: Replicas,
        config: ReducerConfig,
        *,
        weighting: Weighting | None = None,
        maker: BucketMaker | None = None,
        finiteness: Finiteness | None = None,
        clock: Clock | None = None,
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
        self._weighting = weighting
        self._maker = maker
        self._say = say
        self._collectives = replicas.collectives
        self._params = list(replicas.parameters.values())
        reduces_by_itself = config.comm_hook is None
        of_gradients = self._collectives.gradient_group() if reduces_by_itself else self._collectives
        self._reduction = reduction = reduction_of(config, of_gradients)
        # All buckets wait for the end of a backward.
        self._holds = not config.overlap
        shares_group = of_gradients is self._collectives and of_gradients.world_size > 1 and not self._holds
        self._foreign = self._collectives.foreign if shares_group else ForeignCollectives(None)
        self._num_foreign = 0  # when the backward began
        self._plan_cache = PlanCache(
            replicas, config, reduction=reduction, stats=self.stats, clock=clock, say=say, maker=maker
        )
        self._new_queue = partial(
            LaunchQueue,
            reduction=reduction,
            collectives=self._collectives,
            finiteness=self.finiteness,
            stats=self.stats,
            foreign=self._foreign,
        )
        self._end = BackwardEnd(
            replicas,
            self._plan_cache,
            new_queue=self._new_queue,
            weighting=self._weighting,
            finiteness=self.finiteness,
            stats=self.stats,
        )
        self._keeps_memory = False
        self._no_sync_depth = 0
        self._backward: BackwardPass | None = None
        self._failure = ""
        self._index_of = {id(param): index for index, param in enumerate(self._params)}
        self._is_passthrough = (
            self._collectives.world_size == 1 and config.comm_hook is None and config.trains_on and weighting is None
        )
        take_over(replicas.parameters)
        self._hooks = GradientHooks([] if self._is_passthrough else self._params, self._act_on_gradient, self.close)

    def close(self) -> None:
        """Take the hooks off the parameters and let go of the buffers. Gradients stay where they are."""
        self._hooks.remove()
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
        return self._end.has_exchanged and (self._maker is None or self._maker.have_arrived)

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
    def backward(self, *, takes_part: bool = True) -> Iterator[None]:
        """Run one backward inside; afterwards its gradients are final, even if no parameter took part in it.

        Backwards that do not run inside are not synchronised. If one that does raises, this rank leaves the exchange
        (Note: failed backwards, in `backward_pass`).

        Args:
            takes_part: the module certainly takes part, on all ranks; otherwise its first gradient tells.
        """
        if self._is_passthrough:
            self.finiteness.begin(self.stats)
            yield
            self._finish_alone()
            return
        if self._backward is not None:  # a part of the backward around it
            yield
            return
        self._refuse_after_failure()
        self._num_foreign = self._foreign.count()
        if takes_part:
            self._begin()
        else:
            self._hooks.expect_first()
        try:
            yield
            self._look_for_user_collectives()
        except BaseException as error:
            self._fail(error)
            raise
        self._finish()

    @property
    def has_failed(self) -> bool:
        """Whether a backward has failed on this rank in which other ranks may be waiting: there is no next one."""
        return bool(self._failure)

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient has arrived in the backward that runs."""
        return self._hooks.have_arrived

    @property
    def is_synchronised(self) -> bool:
        """Whether backwards that begin now are synchronised (`no_sync`)."""
        return self._no_sync_depth == 0

    def own_gradients(self, params: Iterable[Tensor]) -> list[str]:
        """Return the names of those `params` to whose gradients a backward has added that this was not told of."""
        if not self._hooks.have_counted:
            return []
        indices = [self._index_of.get(id(param)) for param in params if param.grad is not None]
        return [self.specs[i].name for i in indices if i is not None and self._hooks.has_counted(i)]

    def _finish_alone(self) -> None:
        """End a backward of a rank that is alone (Note: one rank)."""
        if self._no_sync_depth == 0:
            self.stats.num_backwards += 1
            with torch.no_grad():
                self.finiteness.read_without_others(self.stats)

    def _act_on_gradient(self, index: int) -> None:
        """Handle a gradient that completes a bucket, or any as long as there is no plan."""
        backward = self._backward
        if backward is None:
            backward = self._begin()
            if not self._hooks.counts(index):
                return
        if not backward.trainable[index]:
            return  # frozen since the forward: autograd calls its hook, but gives it no gradient
        bucket_set = backward.bucket_set
        if bucket_set is None:
            self._see_arrival(index, backward)
            return
        bucket_index = bucket_set.index_of_bucket[index]
        bucket = bucket_set.buckets[bucket_index]
        if bucket.arrivals.launched:
            raise self._plan_cache.late_gradient(index, bucket_index)
        if backward.queue is None:
            # Later micro-batches then accumulate into the buffer: no copy, and no second set of gradients.
            bucket.collect()
            return
        backward.observer.bucket_ready(bucket_index)
        if not self._holds:
            backward.queue.launch_complete()

    def _begin(self) -> BackwardPass:
        with self._foreign.left_out():
            self.finiteness.begin(self.stats)
            self.give_back_memory()
            if self._maker is not None:
                self._maker.begin_backward()
        trainable = tuple([param.requires_grad for param in self._params])
        syncs = self._no_sync_depth == 0
        weighting = self._weighting
        has_changed = weighting is not None and weighting.begin(self._params, syncs=syncs, trainable=trainable)
        if self._plan_cache.will_change(trainable):
            # Not both at once, old buffers and new ones: there may be no memory for that.
            self.bucket_set = None
            self._hooks.begin(None)
        bucket_set = self._plan_cache.bucket_set(trainable)
        # Without a plan nothing leaves before the backward has ended, which is early enough to compare.
        factor = self._end.factor(trainable) if has_changed and bucket_set is not None else None
        tuner = self._plan_cache.tuner(trainable) if syncs else None
        self._hooks.begin(bucket_set)
        is_recorded = syncs and self.observer is not NO_OBSERVER and not is_being_captured(self._collectives.device)
        observer = all_of(tuner, self.observer if is_recorded else None)
        self._backward = BackwardPass(
            trainable,
            syncs,
            observer,
            is_tuned=tuner is not None,
            bucket_set=bucket_set,
            queue=self._new_queue(bucket_set, observer=observer, num_foreign=self._num_foreign)
            if syncs and bucket_set is not None
            else None,
            factor=factor,
            some_miss=syncs and weighting is not None and weighting.some_miss,
        )
        observer.backward_began()
        return self._backward

    def _look_for_user_collectives(self) -> None:
        """Have buckets wait for the end of backwards from now on if there were some (Note: collectives of users)."""
        if self._foreign.count() == self._num_foreign or self._holds:
            return
        queue = None if self._backward is None else self._backward.queue
        if queue is not None and queue.may_be_out_of_order:
            raise RuntimeError(
                f"The program has begun to communicate inside a backward, and rank {self._collectives.global_rank} does"
                " not use all parameters in it: other ranks may have reduced gradients at another moment, so that"
                " collectives which do not belong together have met. Communicate in the first backward, too: gradients"
                " then wait for the end of each. Or pass `overlap=False` to the strategy."
            )
        self._holds = True
        if self._collectives.rank == 0:
            self._say(
                "bucketddp: the program communicates inside backward, so gradients are exchanged when it has ended."
            )

    def _see_arrival(self, param_index: int, backward: BackwardPass) -> None:
        backward.arrived.append(param_index)
        if self._collectives.device.type == "cuda":
            backward.streams.add(torch.cuda.current_stream(self._collectives.device))

    def _finish(self) -> None:
        backward, self._backward = self._backward, None
        try:
            if backward is None or not backward.syncs:
                return
            with self._foreign.left_out():
                self._end.finish(backward)
        finally:
            self._hooks.reset()
            if backward is not None:
                self.bucket_set = backward.bucket_set or self.bucket_set

    def _fail(self, error: BaseException) -> None:
        self._backward = None
        self._hooks.reset()
        # Also if no gradient has come here yet: on other ranks some may have.
        if self._no_sync_depth == 0:
            self._failure = f"{type(error).__name__}: {error}"

    def _refuse_after_failure(self) -> None:
        if self.has_failed or not self._collectives.is_open:
            raise RuntimeError(
                f"Rank {self._collectives.global_rank} cannot go on: a backward has failed"
                f"{f' ({self._failure})' if self.has_failed else ''} while ranks were exchanging its gradients. Do not"
                " catch that exception, or raise it before the backward."
            )


def reduction_of(config: ReducerConfig, collectives: Collectives) -> Reduction:
    """Return what takes means over the ranks of `collectives`, or has a communication hook do it."""
    if config.comm_hook is not None:
        return CommHookReduction(collectives, config.comm_hook, config.comm_state)
    dtype = REDUCE_DTYPES.get(config.reduce_dtype or "")
    if dtype != torch.int8:
        return MeanReduction(collectives, dtype=dtype)
    return QuantizedMeanReduction(collectives) if collectives.world_size > 1 else MeanReduction(collectives)
