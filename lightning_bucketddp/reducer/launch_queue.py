"""The reductions of one backward: launched in bucket order, waited for in bucket order.

Note: one launch order
    Buckets leave strictly by index, on every rank, always. A bucket is complete when its members' gradients have
    arrived; whatever is incomplete when backward ends leaves then, in order, with zeros for what is missing. So every
    rank issues the same collectives in the same order whatever its own graph did.

Note: the last bucket
    It leaves when the backward has ended well on this rank, complete or not. So no rank gets all gradients of a step,
    and takes it, when the backward has failed on another one.

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
from dataclasses import dataclass

import torch

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.process_group import ForeignCollectives
from lightning_bucketddp.planning.plan import ParameterSpec
from lightning_bucketddp.reducer.bucket import Bucket, PendingReduction, Reduction
from lightning_bucketddp.reducer.bucket_set import BucketSet
from lightning_bucketddp.reducer.nonfinite import Finiteness
from lightning_bucketddp.reducer.observer import NOTHING, BackwardObserver, ReducerStats, profiler_span
from lightning_bucketddp.wording import list_names


@dataclass(frozen=True, slots=True)
class _Missing:
    """A gradient that this rank does not have."""

    bucket: Bucket
    position: int
    param_index: int


class LaunchQueue:
    """Launches the buckets of one backward in order, and waits for them in order.

    Args:
        collectives: for what `reduction` does not cover.
        foreign: collectives of others in the group of `reduction` (Note: collectives of users).
        num_foreign: how many there were when the backward began.
    """

    __slots__ = (
        "_collectives",
        "_finiteness",
        "_foreign",
        "_in_flight",
        "_missing",
        "_num_foreign",
        "_observer",
        "_reduction",
        "_stats",
        "bucket_set",
        "next_to_launch",
    )

    def __init__(
        self,
        bucket_set: BucketSet,
        *,
        reduction: Reduction,
        collectives: Collectives,
        finiteness: Finiteness,
        stats: ReducerStats,
        foreign: ForeignCollectives,
        observer: BackwardObserver,
        num_foreign: int = 0,
    ) -> None:
        self.next_to_launch = 0
        self.bucket_set = bucket_set
        self._reduction = reduction
        self._collectives = collectives
        self._finiteness = finiteness
        self._stats = stats
        self._foreign = foreign
        self._num_foreign = num_foreign
        self._observer = observer
        self._in_flight: list[PendingReduction] = []
        self._missing: list[_Missing] = []

    def describe(self, specs: Sequence[ParameterSpec]) -> str:
        """Return in words which bucket is next, with its parameters."""
        index, num_buckets = self.next_to_launch, len(self.bucket_set.buckets)
        if index == num_buckets:
            return f", all {num_buckets} buckets launched"
        names = [specs[member].name for member in self.bucket_set.plan[index].members]
        return f", before bucket {index} of {num_buckets} ({list_names(names)})"

    def launch_complete(self) -> None:
        """Launch buckets up to the first that still waits for a gradient, or the last (Note: the last bucket)."""
        buckets = self.bucket_set.buckets
        while self.next_to_launch < len(buckets) - 1 and buckets[self.next_to_launch].arrivals.pending <= 0:
            with self._foreign.left_out():
                self._launch_next()
            self._num_foreign = self._foreign.num_seen

    @property
    def may_be_out_of_order(self) -> bool:
        """Whether a bucket could not leave while the user communicated: on other ranks it may have."""
        is_held_back = self.next_to_launch < len(self.bucket_set.buckets) - 1
        return is_held_back and self._foreign.num_seen > self._num_foreign

    def launch_rest(self) -> None:
        """Launch all buckets that are left: backward has ended, and what has not arrived by now is missing."""
        while self.next_to_launch < len(self.bucket_set.buckets):
            self._launch_next()

    @property
    def missing(self) -> list[int]:
        """The parameters whose gradients this rank does not have, of those whose buckets have left."""
        return [missing.param_index for missing in self._missing]

    def wait(self, *, factor: float, all_miss_the_same: bool = False) -> None:
        """Make the gradients final: what was reduced, multiplied by `factor`."""
        self._wait_for_all()
        if factor != 1:
            self.bucket_set.scale(factor)
        if self._missing:
            if not all_miss_the_same:
                self._attach_used_elsewhere()
            self._stats.num_unused += len(self._missing)
        self.bucket_set.release()

    def _wait_for_all(self) -> None:
        for index, pending in enumerate(self._in_flight):
            pending.wait()
            self._observer.reduction_ended(index)

    def _launch_next(self) -> None:
        bucket = self.bucket_set.buckets[self.next_to_launch]
        # Off already in a backward, but for one that makes a graph of gradients. Asking costs less than turning it off.
        with torch.no_grad() if torch.is_grad_enabled() else NOTHING, profiler_span("bucketddp::launch"):
            self._join_producers(bucket)
            missing = bucket.collect()
            self._start(bucket, missing=missing)

    def _start(self, bucket: Bucket, *, missing: Sequence[int]) -> None:
        index = self.next_to_launch
        self.next_to_launch += 1
        is_last = self.next_to_launch == len(self.bucket_set.buckets)
        bucket.arrivals.launched = True
        if missing:
            bucket.zero(missing)
            members = self.bucket_set.plan[index].members
            self._missing += [_Missing(bucket, position, members[position]) for position in missing]
        self._finiteness.see_bucket(bucket)
        if is_last:
            self._write_flags()
            self._finiteness.write(self.bucket_set)
        self._observer.bucket_launched(index)
        pending = bucket.start(self._reduction, index=index, is_last=is_last)
        self._in_flight.append(pending)
        self._observer.reduction_started(index, pending)
        self._stats.num_reductions += 1
        self._stats.bytes_reduced += bucket.num_bytes

    def _write_flags(self) -> None:
        flags = self.bucket_set.flags
        flags.elements.fill_(1)
        if self._missing:
            # Without waiting for the device, as `torch.tensor` does.
            unused = torch.tensor(self.missing, pin_memory=not flags.used.is_cpu)
            flags.used.index_fill_(0, unused.to(flags.used.device, non_blocking=True), 0)

    def _attach_used_elsewhere(self) -> None:
        used = self.bucket_set.flags.used.tolist()
        for missing in self._missing:
            if used[missing.param_index] > 0:
                missing.bucket.attach(missing.position)

    def _join_producers(self, bucket: Bucket) -> None:
        """Wait for gradients that were computed on other streams than this one."""
        if len(self.bucket_set.streams) < 2:
            return
        current = torch.cuda.current_stream(self._collectives.device)
        for stream in self.bucket_set.streams:
            current.wait_stream(stream)
        for param in bucket.params:
            if param.grad is not None:
                param.grad.record_stream(current)
