"""From gradients to averaged gradients: where a backward begins, what each gradient leads to, and how it ends.

The first synchronised backward launches nothing. It records in which order gradients arrive and how often each hook
fires; when it ends the plan is made in the order that rank 0 saw. So does each further set of trainable parameters.

Note: failed backwards
    When a backward raises on a rank, nobody may step: the others have gradients in which that rank's are missing. So it
    does not take part in what is left of the exchange, and the others, who wait for it, learn why. Whoever marks a
    backward sees to that.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
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
    all_of,
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
        weighting: how much each rank counts; None: all of them the same, always.
        maker: plans and makes buckets in our place; None: there is none.
        finiteness: looks for what is not finite; None: as `config` says.
        clock: what time is measured by for `bucket_cap_mb="auto"`; None: that of the parameters' device.
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
        clock: Clock | None = None,
        report: Callable[[str], None] = log.info,
    ) -> None:
        replicas.check_trainable()
        self.stats = ReducerStats()
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
        self._reduction = reduction = reduction_of(config, of_gradients)
        self._holds = not config.overlap  # all buckets wait for the end of a backward
        shares_group = of_gradients is self._collectives and of_gradients.world_size > 1 and not self._holds
        self._foreign = self._collectives.foreign if shares_group else ForeignCollectives(None)
        self._num_foreign = 0  # when the backward began
        self._device = self._collectives.device
        clock = clock or clock_of(self._device)
        self.plans = PlanCache(replicas, config, reduction, self.stats, clock, report, maker)
        # What plans know of each parameter; a plan's members are indices into this.
        self.specs = self.plans.specs
        self._new_queue = partial(
            LaunchQueue, reduction=reduction, finiteness=self.finiteness, stats=self.stats, foreign=self._foreign
        )
        # Recorded when gradients are final.
        self._exchanged: Any = torch.Event(self._device) if self._device.type == "cuda" else None
        self._keeps_memory = False
        self._no_sync_depth = 0
        # What was trainable in backwards that were not synchronised, since the last one that was.
        self.accumulated: tuple[bool, ...] = ()
        self._backward: BackwardPass | None = None
        self.captured: CapturedBackward | None = None  # the backward is being captured (`replay`)
        self.factor = 1.0  # what the mean was multiplied by in the last backward that was not captured
        self._failure = ""
        self._index_of = {id(param): index for index, param in enumerate(self.params)}
        # A rank that is alone has nothing to exchange: no hooks, no buckets and no copies of gradients.
        self.is_alone = of_gradients.world_size == 1 and not self.uses_hook and config.trains_on and weighting is None
        take_over(replicas.parameters)
        self._hooks = GradientHooks([] if self.is_alone else self.params, self._act_on_gradient, self.close)

    def close(self) -> None:
        """Take the hooks off the parameters and let go of the buffers. Gradients stay where they are."""
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
        """What was measured for `bucket_cap_mb="auto"`, once that has been decided upon; on rank 0 only."""
        return self.plans.profile

    @property
    def has_exchanged(self) -> bool:
        """Whether the last exchanges, of gradients and of weights, have ended on the device, too."""
        are_final = self._exchanged is None or bool(self._exchanged.query())
        return are_final and (self.maker is None or self.maker.have_arrived)

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
        if is_being_captured(self._device):
            self._keeps_memory = True  # what was captured goes on to use it
        if self.bucket_set is not None and not self._keeps_memory:
            self.bucket_set.give_back()

    @contextmanager
    def backward(self, *, takes_part: bool = True) -> Iterator[None]:
        """Run one backward inside; afterwards its gradients are final, even if no parameter took part in it.

        Backwards that do not run inside are not synchronised. If one that does raises, this rank leaves the exchange
        (Note: failed backwards). `takes_part`: the module certainly does, on all ranks; otherwise a gradient tells.
        """
        if self.is_alone and self.captured is not None:
            self.captured.trainable = self.trainable()
            yield
            return
        if self.is_alone:
            self.finiteness.begin()
            self.finiteness.catch_up(self.stats)
            yield
            self.finish_alone()
            return
        if self._backward is not None:  # a part of the backward around it
            yield
            return
        self.refuse_after_failure()
        self._num_foreign = self._foreign.count()
        if takes_part:
            self._begin()
        else:
            self._hooks.expect_first()
        try:
            yield
            self._look_for_user_collectives()
        except BaseException as error:
            self.fail(error)
            raise
        self._finish()

    def finish_alone(self) -> None:
        if self._no_sync_depth == 0:
            self.stats.num_backwards += 1
            with torch.no_grad():
                self.finiteness.read(None, self.stats)

    def refuse_after_failure(self) -> None:
        if self.has_failed or not self._collectives.is_open:
            # The failure is not in the text: who catches by text ("out of memory") would catch this, too.
            raise RuntimeError(
                f"Rank {self._collectives.global_rank} cannot go on: a backward has failed while ranks were exchanging"
                " its gradients. Do not catch that exception, or raise it before the backward."
            ) from (RuntimeError(self._failure) if self.has_failed else None)

    def fail(self, error: BaseException) -> None:
        self._backward = None
        self._hooks.reset()
        # Also if no gradient has come here yet: on other ranks some may have. What is captured has not begun to run.
        if self._no_sync_depth == 0 and self.captured is None:
            self._failure = f"{type(error).__name__}: {error}"

    def settled(self) -> tuple[bool, ...] | None:
        """Return what is trainable now if it has a plan, and no better one is being looked for; None: not so."""
        trainable = self.trainable()
        # In a step in which something was frozen nothing is captured, nor replayed: that would give it a gradient.
        is_frozen = self.accumulated and trainable != tuple([param.requires_grad for param in self.params])
        return trainable if self.is_alone or (not is_frozen and self.plans.is_settled(trainable)) else None

    def num_hooks(self, param: Tensor) -> int:
        return int(not self.is_alone and id(param) in self._index_of)

    def trainable(self) -> tuple[bool, ...]:
        """Return what is to be averaged: also what is frozen by now, but has accumulated gradients on each rank."""
        trainable = tuple([param.requires_grad for param in self.params])
        return tuple(map(operator.or_, trainable, self.accumulated)) if self.accumulated else trainable

    @property
    def has_failed(self) -> bool:
        """Whether a backward has failed on this rank in which other ranks may be waiting: there is no next one."""
        return bool(self._failure)

    @property
    def has_gradients(self) -> bool:
        return self._hooks.have_arrived

    @property
    def is_synchronised(self) -> bool:
        return self._no_sync_depth == 0

    def own_gradients(self, params: Iterable[Tensor]) -> list[str]:
        """Return the names of those `params` to whose gradients a backward has added that this was not told of."""
        if not self._hooks.have_counted:
            return []
        indices = [self._index_of.get(id(param)) for param in params if param.grad is not None]
        return [self.specs[i].name for i in indices if i is not None and self._hooks.has_counted(i)]

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
            backward.arrived.append(index)
            if self._device.type == "cuda":
                backward.streams.add(torch.cuda.current_stream(self._device))
            return
        bucket_index = bucket_set.index_of_bucket[index]
        bucket = bucket_set.buckets[bucket_index]
        if bucket.arrivals.launched:
            raise self.plans.late_gradient(index, bucket_index)
        if backward.queue is None:
            # Later micro-batches then accumulate into the buffer: no copy, and no second set of gradients.
            bucket.collect()
            return
        backward.observer.bucket_ready(bucket_index)
        if not self._holds:
            backward.queue.launch_complete()

    def _begin(self) -> BackwardPass:
        captured = self.captured
        with self._foreign.left_out():
            if captured is None:
                self.factor = 1.0
                self.finiteness.begin()
                self.finiteness.catch_up(self.stats)
            self.give_back_memory()
            if self.maker is not None and captured is None:
                self.maker.begin_backward()
        trainable = self.trainable()
        syncs = self._no_sync_depth == 0
        if captured is None:
            self.accumulated = () if syncs else trainable
        weighting = self.weighting if captured is None else None
        has_changed = weighting is not None and weighting.begin(self.params, syncs=syncs, trainable=trainable)
        if self.plans.will_change(trainable):
            # Not both at once, old buffers and new ones: there may be no memory for that.
            self.bucket_set = None
            self._hooks.begin(None)
        bucket_set = self.plans.bucket_set(trainable)
        # Without a plan nothing leaves before the backward has ended, which is early enough to compare.
        factor = self.factor_of_mean(trainable) if has_changed and bucket_set is not None else None
        tuner = self.plans.tuner(trainable) if syncs else None
        self._hooks.begin(bucket_set)
        is_recorded = syncs and self.observer is not NO_OBSERVER and not is_being_captured(self._device)
        observer = all_of(tuner, self.observer if is_recorded else None)
        queue = None
        if syncs and bucket_set is not None:
            queue = self._new_queue(bucket_set=bucket_set, observer=observer, num_foreign=self._num_foreign)
        self._backward = BackwardPass(
            trainable=trainable,
            syncs=syncs,
            observer=observer,
            is_tuned=tuner is not None,
            bucket_set=bucket_set,
            queue=queue,
            factor=factor if captured is None else 1.0,
            some_miss=syncs and weighting is not None and weighting.some_miss,
            captured=captured,
        )
        if captured is not None:
            captured.trainable, captured.syncs, captured.bucket_set = trainable, syncs, bucket_set
        observer.backward_began()
        return self._backward

    def _look_for_user_collectives(self) -> None:
        """Have buckets wait for the end of backwards from now on if there were some (Note: collectives of users)."""
        if self._foreign.count() == self._num_foreign or self._holds:
            return
        if self._backward is not None and self._backward.queue is not None:
            self._backward.queue.check_order()
        self._holds = True
        if self._collectives.rank == 0:
            self._report(
                "bucketddp: the program communicates inside backward, so gradients are exchanged when it has ended."
            )

    def factor_of_mean(self, trainable: tuple[bool, ...]) -> float:
        """Return what the mean is multiplied by; raise if some rank is not in this backward, or trains other things."""
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
        backward.observer.backward_ended()
        # First of all: it raises, before anything waits in vain, if some rank is not in this backward.
        factor = self.factor_of_mean(backward.trainable) if backward.factor is None else backward.factor
        with torch.no_grad(), profiler_span("bucketddp::finish"):
            if any(backward.trainable):
                self._reduce_rest(backward, factor)
            if backward.captured is not None:
                return
            self.factor = factor
            if self.weighting is not None:
                self.weighting.end()
        backward.observer.gradients_final()
        if backward.bucket_set is None:
            return
        with torch.no_grad():
            self.read_digests(backward.bucket_set)
            if backward.is_tuned:
                self.plans.end_backward(backward.trainable)

    def read_digests(self, bucket_set: BucketSet) -> None:
        """Count a backward whose gradients are final, and look for what is not finite in them."""
        self.stats.num_backwards += 1
        if self._exchanged is not None and not is_being_captured(self._device):
            self._exchanged.record()
        self.finiteness.read(bucket_set, self.stats)

    def _reduce_rest(self, backward: BackwardPass, factor: float) -> None:
        if backward.queue is None:
            backward.bucket_set = self.plans.make(backward.trainable, backward.arrived, backward.streams)
            backward.queue = self._new_queue(bucket_set=backward.bucket_set, observer=backward.observer)
        backward.queue.launch_rest()
        weighting, missing = self.weighting, backward.queue.missing
        if backward.captured is not None:
            backward.captured.missing = list(missing)
            backward.captured.bytes_sent = sum(pending.bytes_sent for pending in backward.queue.in_flight)
            backward.queue.wait(factor=factor, all_miss_the_same=True)
            return
        same = weighting is not None and weighting.compare_missing(missing, some_miss=backward.some_miss)
        backward.queue.wait(factor=factor, all_miss_the_same=same)
