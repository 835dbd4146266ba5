"""Average gradients while backward runs: how a backward begins, what each gradient triggers, and how it ends.

The first synchronised backward launches nothing. It records in which order gradients arrive and how often each hook
fires; when it ends the plan is made in the order of rank 0. The same happens for each new set of trainable parameters.

Note: failed backwards
    When a backward raises on a rank, no rank may step: the others have gradients in which that rank's are missing. So
    it does not take part in the rest of the exchange. The caller of `backward` notifies the others, who wait.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_bucketddp.comm.process_group import ForeignCollectives
from lightning_bucketddp.comm.step_exchange import Weighting
from lightning_bucketddp.config import MIB, ReducerConfig
from lightning_bucketddp.planning.cost import Profile
from lightning_bucketddp.reducer.bucket_set import BucketMaker, BucketSet
from lightning_bucketddp.reducer.grad_hooks import GradientHooks, take_over
from lightning_bucketddp.reducer.launch_queue import BackwardPass, CapturedBackward, LaunchQueue
from lightning_bucketddp.reducer.nonfinite import Finiteness
from lightning_bucketddp.reducer.observer import (
    NO_OBSERVER,
    BackwardObserver,
    Clock,
    ReducerStats,
    clock_of,
    is_being_captured,
    profiler_span,
)
from lightning_bucketddp.reducer.plan_cache import PlanCache
from lightning_bucketddp.reducer.quantization import reduction_of
from lightning_bucketddp.replicas.replicas import Replicas

log = logging.getLogger(__name__)


class Reducer:
    """Averages the gradients of a module over the ranks while backward runs.

    Args:
        replicas: the module's parameters; the caller has made the ranks agree on them.
        weighting: how much each rank counts; None: always the same.
        maker: plans and makes sharded buckets; None: there are none.
        finiteness: finds losses and gradients that are not finite; None: one is made from `config`.
        stats: counters to go on with, those of a reducer that this one replaces; None: all are 0.
        clock: measures time for `bucket_cap_mb="auto"`; None: the clock of the parameters' device.
        report: logs a decision in one line, on rank 0.
    """

    def __init__(
        self,
        replicas: Replicas,
        config: ReducerConfig,
        *,
        weighting: Weighting | None = None,
        maker: BucketMaker | None = None,
        finiteness: Finiteness | None = None,
        stats: ReducerStats | None = None,
        clock: Clock | None = None,
        report: Callable[[str], None] = log.info,
    ) -> None:
        replicas.check_trainable()
        self.stats = stats or ReducerStats()
        self.finiteness = finiteness or Finiteness(replicas, config)
        self.bucket_set: BucketSet | None = None
        self.observer: BackwardObserver = NO_OBSERVER  # another one is set while a step is recorded
        self.replicas = replicas
        self.weighting = weighting
        self.maker = maker
        self._report = report
        self._collectives = replicas.collectives
        self.params = list(replicas.parameters.values())
        self.uses_hook = config.comm_hook is not None
        of_gradients = self._collectives if self.uses_hook else self._collectives.gradient_group()
        self._reduction = reduction_of(config, of_gradients)
        self._holds = not config.overlap  # all buckets wait for the end of a backward
        is_shared = of_gradients is self._collectives and of_gradients.world_size > 1 and not self._holds
        self._foreign = self._collectives.foreign if is_shared else ForeignCollectives(None)
        self._num_foreign = 0  # when the backward began
        self._device = self._collectives.device
        clock = clock or clock_of(self._device)
        self.plans = PlanCache(replicas, config, self._reduction, self.stats, clock, report, maker)
        self.specs = self.plans.specs  # a plan's members are indices into this
        # Recorded when gradients are final.
        self._exchanged: Any = torch.Event(self._device) if self._device.type == "cuda" else None
        self._keeps_memory = False
        self._no_sync_depth = 0
        # What was trainable in backwards without synchronisation, since the last one with it.
        self.accumulated: tuple[bool, ...] = ()
        self._backward: BackwardPass | None = None
        self._begun = [self]
        self.factor = 1.0  # what the mean was multiplied by in the last backward that was not captured
        self._failure = ""
        self._index_of = {id(param): index for index, param in enumerate(self.params)}
        # A rank that is alone has nothing to exchange: no hooks, no buckets and no copies of gradients.
        self.is_alone = of_gradients.world_size == 1 and not self.uses_hook and config.trains_on and weighting is None
        take_over(replicas.parameters)
        self._hooks = GradientHooks([] if self.is_alone else self.params, self._act_on_gradient, self.close)

    def close(self) -> None:
        """Remove the hooks and the buffers. Gradients stay where they are."""
        self._hooks.remove()
        self.plans.close()
        self._reduction.close()
        self.bucket_set = None

    def describe(self) -> str:
        stats = self.stats
        return (
            f"{self.plans.description}; {stats.num_reductions} reductions in {stats.num_backwards} synchronised"
            f" backwards, {stats.bytes_sent / MIB:.1f} MiB"
        )

    def describe_backward(self) -> str:
        queue = self._backward and self._backward.queue
        return queue.describe(self.specs) if queue else ""

    @property
    def profile(self) -> Profile | None:
        """What was measured for `bucket_cap_mb="auto"`, once the plan is decided; on rank 0 only."""
        return self.plans.profile

    @property
    def has_exchanged(self) -> bool:
        """Whether the last exchanges, of gradients and of weights, have ended on the device, too."""
        is_final = self._exchanged is None or bool(self._exchanged.query())
        return is_final and (self.maker is None or self.maker.have_arrived)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only, in backwards inside; where forward ran does not matter."""
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    def give_back_memory(self) -> None:
        """Free buffers without gradients when a forward or a backward begins (Note: memory between steps)."""
        if is_being_captured(self._device):
            self._keeps_memory = True  # replays use it
        if self.bucket_set is not None and not self._keeps_memory:
            self.bucket_set.give_back()

    @contextmanager
    def backward(self, *, takes_part: bool = True, begun: list[Reducer] | None = None) -> Iterator[None]:
        """Run one backward inside; afterwards its gradients are final, even if no parameter took part in it.

        Backwards outside of it are not synchronised. If one inside raises, this rank leaves the exchange (Note: failed
        backwards). `takes_part`: the module certainly does, on all ranks; otherwise its first gradient shows it.
        `begun`: the reducers that have begun this backward, to which this one is added. Only the first launches buckets
        before its end, because a bucket that is incomplete on one rank would leave behind those of another module.
        """
        begun = [] if begun is None else begun
        if self.is_alone:
            begun.append(self)
            self.finiteness.begin()
            self.finiteness.catch_up(self.stats)
            yield
            self.finish_alone()
            return
        if self._backward is not None:  # it is nested in another one
            yield
            return
        self._begun = begun
        self.refuse_after_failure()
        self._num_foreign = self._foreign.count()
        if takes_part:
            self._begin()
        else:
            self._hooks.expect_first()
        try:
            yield
            self._check_user_collectives()
        except BaseException as error:
            self.fail(error)
            raise
        self._finish()

    @contextmanager
    def captured_backward(self, captured: CapturedBackward) -> Iterator[None]:
        """Run a backward inside that only exchanges gradients, and note in `captured` what a replay of it needs.

        The plan is settled. Weights, non-finite checks and messages between ranks belong to each replay (`graphs`).
        """
        captured.trainable, captured.syncs = self.trainable(), self.is_synchronised
        if self.is_alone:
            yield
            return
        self.refuse_after_failure()
        self._num_foreign = self._foreign.count()
        self.give_back_memory()
        captured.bucket_set = bucket_set = self.plans.bucket_set(captured.trainable)
        assert bucket_set is not None
        self._hooks.begin(bucket_set)
        queue = self._new_queue(bucket_set, NO_OBSERVER) if captured.syncs else None
        self._backward = BackwardPass(
            trainable=captured.trainable, syncs=captured.syncs, observer=NO_OBSERVER, bucket_set=bucket_set, queue=queue
        )
        try:
            yield
            self._check_user_collectives()
            if queue is not None:
                with self._foreign.left_out(), torch.no_grad():
                    queue.launch_rest()
                    captured.missing = list(queue.missing)
                    captured.bytes_sent = sum(pending.bytes_sent for pending in queue.in_flight)
                    queue.wait(factor=1.0, all_miss_the_same=True)
        finally:
            self._backward = None
            self._hooks.reset()
        self.bucket_set = bucket_set

    def finish_alone(self) -> None:
        if self._no_sync_depth == 0:
            self.stats.num_backwards += 1
            with torch.no_grad():
                self.finiteness.read(None, self.stats)

    def refuse_after_failure(self) -> None:
        if self.has_failed or not self._collectives.is_open:
            # The failure is not in the text: code that catches by text ("out of memory") would catch this, too.
            raise RuntimeError(
                f"Rank {self._collectives.global_rank} cannot go on: a backward has failed while ranks were exchanging"
                " its gradients. Do not catch that exception, or raise it before the backward."
            ) from (RuntimeError(self._failure) if self.has_failed else None)

    def fail(self, error: BaseException) -> None:
        self._backward = None
        self._hooks.reset()
        # Also if no gradient has arrived here yet: on other ranks some may have.
        if self._no_sync_depth == 0:
            self._failure = f"{type(error).__name__}: {error}"

    def settled(self) -> tuple[bool, ...] | None:
        """Return what is trainable now, or None if its plan may still change."""
        trainable = self.trainable()
        # A step in which something was frozen is not captured or replayed: that would give it a gradient.
        is_frozen = self.accumulated and trainable != tuple([param.requires_grad for param in self.params])
        return trainable if self.is_alone or (not is_frozen and self.plans.is_settled(trainable)) else None

    def num_hooks(self, param: Tensor) -> int:
        return int(not self.is_alone and id(param) in self._index_of)

    def trainable(self) -> tuple[bool, ...]:
        """Return what is averaged: also what is frozen by now, but has accumulated gradients on each rank."""
        trainable = tuple([param.requires_grad for param in self.params])
        return tuple(map(operator.or_, trainable, self.accumulated)) if self.accumulated else trainable

    @property
    def has_failed(self) -> bool:
        """Whether a backward has failed on this rank, in which other ranks may be waiting: no other one can run."""
        return bool(self._failure)

    @property
    def has_gradients(self) -> bool:
        return self._hooks.have_arrived

    @property
    def is_synchronised(self) -> bool:
        """Whether backwards are synchronised: none is within `no_sync`."""
        return self._no_sync_depth == 0

    def own_gradients(self, params: Iterable[Tensor]) -> list[str]:
        """Return the names of those `params` whose gradients come from a backward outside of `backward`."""
        if not self._hooks.have_counted:
            return []
        indices = [self._index_of.get(id(param)) for param in params if param.grad is not None]
        return [self.specs[i].name for i in indices if i is not None and self._hooks.has_counted(i)]

    def _act_on_gradient(self, index: int) -> None:
        """Handle a gradient that completes a bucket, or any gradient as long as there is no plan."""
        backward = self._backward
        if backward is None:
            backward = self._begin()
            if not self._hooks.counts(index):
                return
        if not backward.trainable[index]:
            return  # frozen since the forward: autograd calls its hook, but gives it no gradient
        bucket_set = backward.bucket_set
        if bucket_set is None:
            backward.arrived.append(index)
            if self._device.type == "cuda":
                backward.streams.add(torch.cuda.current_stream(self._device))
            return
        bucket_index = bucket_set.index_of_bucket[index]
        bucket = bucket_set.buckets[bucket_index]
        if bucket.arrivals.launched:
            raise self.plans.late_gradient(index, bucket_index)
        if backward.queue is None:
            # Later micro-batches then accumulate into the buffer: no copy, and no second set of gradients. Those with a
            # graph (`create_graph`) stay: in the buffer they would keep it, or lose it.
            if not torch.is_grad_enabled():
                bucket.collect()
            return
        backward.observer.bucket_ready(bucket_index)
        if not self._holds and self._begun[0] is self:
            backward.queue.launch_complete()

    def launch_rest(self) -> None:
        """Launch all buckets that are left: the backward has ended well."""
        self._check_user_collectives()
        if self._backward is not None and self._backward.queue is not None:
            with self._foreign.left_out(), torch.no_grad():
                self._backward.queue.launch_rest()

    def _begin(self) -> BackwardPass:
        self._begun.append(self)
        with self._foreign.left_out():
            self.factor = 1.0
            self.finiteness.begin()
            self.finiteness.catch_up(self.stats)
            self.give_back_memory()
            if self.maker is not None:
                self.maker.begin_backward()
        trainable = self.trainable()
        syncs = self.is_synchronised
        self.accumulated = () if syncs else trainable
        weighting = self.weighting
        has_changed = weighting is not None and weighting.begin(self.params, syncs=syncs, trainable=trainable)
        if self.plans.will_change(trainable):
            # There may be no memory for old buffers and new ones at once.
            self.bucket_set = None
            self._hooks.begin(None)
        bucket_set = self.plans.bucket_set(trainable)
        # Without a plan nothing leaves before the backward has ended, which is early enough to compare.
        factor = self.factor_of_mean(trainable) if has_changed and bucket_set is not None else None
        self._hooks.begin(bucket_set)
        observer = NO_OBSERVER if not syncs or is_being_captured(self._device) else self.observer
        self._backward = backward = BackwardPass(
            trainable=trainable,
            syncs=syncs,
            observer=observer,
            tuner=self.plans.tuner(trainable) if syncs else None,
            bucket_set=bucket_set,
            queue=None if bucket_set is None or not syncs else self._new_queue(bucket_set, observer),
            factor=factor,
            some_miss=syncs and weighting is not None and weighting.some_miss,
        )
        if backward.tuner is not None:
            backward.tuner.backward_began()
        observer.backward_began()
        return backward

    def _new_queue(self, bucket_set: BucketSet, observer: BackwardObserver) -> LaunchQueue:
        return LaunchQueue(
            bucket_set=bucket_set,
            reduction=self._reduction,
            finiteness=self.finiteness,
            stats=self.stats,
            observer=observer,
            foreign=self._foreign,
            num_foreign=self._num_foreign,
        )

    def _check_user_collectives(self) -> None:
        """Hold all buckets until the end of backwards if the user communicates (Note: collectives of users)."""
        if self._foreign.count() == self._num_foreign or self._holds:
            return
        # A reducer that did not launch any has not held one back.
        if self._backward is not None and self._backward.queue is not None and self._begun[0] is self:
            self._backward.queue.check_order()
        self._holds = True
        if self._collectives.rank == 0:
            self._report(
                "bucketddp: the program communicates inside backward, so gradients are exchanged when it has ended."
            )

    def factor_of_mean(self, trainable: tuple[bool, ...]) -> float:
        """Return the factor of the mean; raise if a rank is not in this backward, or has other trainable parameters."""
        if self.weighting is None:
            return 1.0
        factor, num_skipped = self.weighting.factor()
        self.stats.num_skipped += num_skipped
        if self.weighting.trainable_differs:
            self.replicas.refuse_trainable(trainable)
        return factor

    def _finish(self) -> None:
        backward, self._backward = self._backward, None
        try:
            if backward is not None and backward.syncs:
                with self._foreign.left_out():
                    self._make_final(backward)
        finally:
            self._hooks.reset()
            if backward is not None:
                self.bucket_set = backward.bucket_set or self.bucket_set

    def _make_final(self, backward: BackwardPass) -> None:
        tuner = backward.tuner
        if tuner is not None:
            tuner.backward_ended()
        backward.observer.backward_ended()
        # First of all: it raises, before anything waits in vain, if some rank is not in this backward.
        factor = self.factor_of_mean(backward.trainable) if backward.factor is None else backward.factor
        with torch.no_grad(), profiler_span("bucketddp::finish"):
            if any(backward.trainable):
                self._reduce_rest(backward, factor)
            self.factor = factor
            if self.weighting is not None:
                self.weighting.end()
        if tuner is not None:
            tuner.gradients_final()
        backward.observer.gradients_final()
        if backward.bucket_set is None:
            return
        with torch.no_grad():
            self.read_digests(backward.bucket_set)
            if tuner is not None:
                self.plans.end_backward(backward.trainable, tuner)

    def read_digests(self, bucket_set: BucketSet) -> None:
        """Count a backward whose gradients are final, and check that they are finite."""
        self.stats.num_backwards += 1
        if self._exchanged is not None and not is_being_captured(self._device):
            self._exchanged.record()
        self.finiteness.read(bucket_set, self.stats)

    def _reduce_rest(self, backward: BackwardPass, factor: float) -> None:
        if backward.queue is None:
            backward.bucket_set = self.plans.make(backward.trainable, backward.arrived, backward.streams)
            backward.queue = self._new_queue(backward.bucket_set, backward.observer)
        queue, weighting = backward.queue, self.weighting
        queue.launch_rest()
        all_miss_the_same = weighting is not None and weighting.compare_missing(
            queue.missing, some_miss=backward.some_miss
        )
        queue.wait(factor=factor, all_miss_the_same=all_miss_the_same)
