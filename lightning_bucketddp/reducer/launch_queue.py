"""The reductions of one backward: launched in bucket order, waited for in bucket order.

Note: one launch order
    Buckets leave strictly by index, on every rank, always. A bucket is complete when its members' gradients have
    arrived; whatever is incomplete when backward ends leaves then, in order, with zeros for what is missing. So every
    rank issues the same collectives in the same order whatever its own graph did. The last bucket, complete or not,
    leaves only when the backward has succeeded on this rank: no rank gets all gradients of a step when the backward has
    failed on another one.

Note: collectives of users
    A bucket may leave before a collective of the user's on one rank and behind it on another. So on a host reductions
    have a group of their own. On a GPU, and with a communication hook, they share one: there collectives that are not
    ours are counted, and after the first one buckets wait for the end of backwards. If a bucket was held back in that
    one backward, the run is refused (docs/design/bucket-order.md).

Note: used-flags
    The last bucket carries one extra element per parameter: 1 where this rank has a gradient, 0 where it has not. Only
    a rank that missed something reads them back, unless it knows that all ranks miss the same. A parameter unused on
    all ranks keeps its `.grad` (None stays None); one used on some ranks gets the mean, with zeros for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_bucketddp.comm.process_group import ForeignCollectives
from lightning_bucketddp.planning.plan import ParameterSpec
from lightning_bucketddp.reducer.bucket import Bucket
from lightning_bucketddp.reducer.bucket_set import BucketSet
from lightning_bucketddp.reducer.nonfinite import Finiteness
from lightning_bucketddp.reducer.observer import NOTHING, BackwardObserver, ReducerStats, profiler_span
from lightning_bucketddp.reducer.plan_cache import PlanTuner
from lightning_bucketddp.reducer.reduction import PendingReduction, Reduction
from lightning_bucketddp.wording import list_names


@dataclass(slots=True, eq=False, kw_only=True)
class LaunchQueue:
    """Launches the buckets of one backward in order, and waits for them in order."""

    bucket_set: BucketSet
    reduction: Reduction
    finiteness: Finiteness
    stats: ReducerStats
    observer: BackwardObserver
    # Of the group of `reduction` (Note: collectives of users), and how many there were when the last bucket left.
    foreign: ForeignCollectives
    num_foreign: int = 0
    next_to_launch: int = 0
    in_flight: list[PendingReduction] = field(default_factory=list)
    # Gradients that this rank does not have, of launched buckets: by parameter, its bucket and position in it.
    missing: dict[int, tuple[Bucket, int]] = field(default_factory=dict)

    def describe(self, specs: Sequence[ParameterSpec]) -> str:
        index, num_buckets = self.next_to_launch, len(self.bucket_set.buckets)
        if index == num_buckets:
            return f", all {num_buckets} buckets launched"
        names = [specs[member].name for member in self.bucket_set.plan[index].members]
        return f", before bucket {index} of {num_buckets} ({list_names(names)})"

    def launch_complete(self) -> None:
        """Launch buckets up to the first that still waits for a gradient, or the last (Note: one launch order)."""
        buckets = self.bucket_set.buckets
        while self.next_to_launch < len(buckets) - 1 and buckets[self.next_to_launch].arrivals.pending <= 0:
            with self.foreign.left_out():
                self._launch_next()
            self.num_foreign = self.foreign.num_seen

    def check_order(self) -> None:
        """Raise if a bucket was held back while the user communicated: on other ranks it may have left."""
        is_held_back = self.next_to_launch < len(self.bucket_set.buckets) - 1
        if is_held_back and self.foreign.num_seen > self.num_foreign:
            raise RuntimeError(
                "The program has begun to communicate inside a backward, and rank"
                f" {self.reduction.collectives.global_rank} does not use all parameters in it: other ranks may have"
                " reduced gradients at another moment, so that collectives which do not belong together have met."
                " Communicate in the first backward, too: gradients then wait for the end of each. Or pass"
                " `overlap=False` to the strategy."
            )

    def launch_rest(self) -> None:
        """Launch the remaining buckets: backward has ended, and what has not arrived by now is missing."""
        while self.next_to_launch < len(self.bucket_set.buckets):
            self._launch_next()

    def wait(self, *, factor: float, all_miss_the_same: bool = False) -> None:
        """Wait for all reductions, multiply by `factor`, and give parameters their gradients."""
        for index, pending in enumerate(self.in_flight):
            pending.wait()
            self.observer.reduction_ended(index)
        if factor != 1:
            for bucket in self.bucket_set.buckets:
                bucket.numbers.mul_(factor)
        if self.missing:
            if not all_miss_the_same:
                self._attach_used_elsewhere()
            self.stats.num_unused += len(self.missing)
        for bucket in self.bucket_set.buckets:
            bucket.release()

    def _launch_next(self) -> None:
        index, bucket_set = self.next_to_launch, self.bucket_set
        bucket, is_last = bucket_set.buckets[index], index == len(bucket_set.buckets) - 1
        # A backward has turned it off, unless it makes a graph of gradients. Asking costs less than turning it off.
        with torch.no_grad() if torch.is_grad_enabled() else NOTHING, profiler_span("bucketddp::launch"):
            self._join_producers(bucket)
            missing = bucket.collect()
            self.next_to_launch += 1
            bucket.arrivals.launched = True
            if missing:
                bucket.zero(missing)
                members = bucket_set.plan[index].members
                self.missing.update({members[position]: (bucket, position) for position in missing})
            self.finiteness.check_bucket(bucket)
            if is_last:
                self._write_flags()
                self.finiteness.write(bucket_set)
            self.observer.bucket_launched(index)
            pending = self.reduction.start(bucket, index=index, is_last=is_last)
            self.in_flight.append(pending)
            self.observer.reduction_started(index, pending)
            self.stats.num_reductions += 1
            self.stats.bytes_sent += pending.bytes_sent

    def _write_flags(self) -> None:
        flags = self.bucket_set.flags
        flags.elements.fill_(1)
        if self.missing:
            # Without waiting for the device, as `torch.tensor` does.
            unused = torch.tensor(list(self.missing), pin_memory=not flags.used.is_cpu)
            flags.used.index_fill_(0, unused.to(flags.used.device, non_blocking=True), 0)

    def _attach_used_elsewhere(self) -> None:
        used = self.bucket_set.flags.used.tolist()
        for param_index, (bucket, position) in self.missing.items():
            if used[param_index] > 0:
                bucket.attach(position)

    def _join_producers(self, bucket: Bucket) -> None:
        """Wait for gradients that were computed on other streams than this one."""
        if len(self.bucket_set.streams) < 2:
            return
        current = torch.cuda.current_stream(self.reduction.collectives.device)
        for stream in self.bucket_set.streams:
            current.wait_stream(stream)
        for param in bucket.params:
            if param.grad is not None:
                param.grad.record_stream(current)


@dataclass(slots=True)
class CapturedBackward:
    """What a replay needs of the backward that was captured."""

    trainable: tuple[bool, ...] = ()  # by parameter
    syncs: bool = False  # gradients are exchanged in it
    bucket_set: BucketSet | None = None  # None: this rank is alone
    missing: list[int] = field(default_factory=list)  # parameters without a gradient
    bytes_sent: int = 0
    loss_digest: Tensor | None = None  # of the losses that it has not exchanged


@dataclass(slots=True, kw_only=True)
class BackwardPass:
    """Everything that belongs to one backward and dies with it."""

    trainable: tuple[bool, ...]  # by parameter
    syncs: bool  # gradients are exchanged at its end, if not before
    observer: BackwardObserver
    bucket_set: BucketSet | None  # None: there is no plan yet
    queue: LaunchQueue | None  # None: nothing is launched before the end
    tuner: PlanTuner | None = None  # measures it, to compute a better plan
    factor: float | None = None  # what the mean is multiplied by; None: that is known at the end
    some_miss: bool = False  # all ranks compare what they miss when it ends
    # Parameters whose gradients arrived, as long as there is no plan, and the streams on which they did.
    arrived: list[int] = field(default_factory=list)
    streams: set[torch.cuda.Stream] = field(default_factory=set)
