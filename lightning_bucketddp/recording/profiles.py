"""A profile of a backward from recorded steps, and plans by position in a profile. Pure.

Note: profiles from buckets
    A step that was recorded tells when each bucket was complete, and not when each gradient came. Between the bucket
    before and its own completion, the gradients of a bucket are taken to arrive at an even rate of bytes. What a
    reduction costs is read off the buckets' reductions; these wait for the slowest rank, too, so take the steps of the
    slowest rank if there is a choice. Where the sizes of the buckets differ by less than a factor of 4, their times
    show noise and not what size makes of them: such a profile knows no cost.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_bucketddp.planning.all_reduce_cost import AllReduceCost
from lightning_bucketddp.planning.backward_profile import Profile
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec
from lightning_bucketddp.recording.record import RecordedBucket, RecordedPlan, Span, Step

_REDUCING = ("backward", "exposed")
# By which factor sizes must differ.
_DIFFERENT = 4
# Why such a profile knows no cost.
NO_COST = f"the sizes of its buckets differ by less than a factor of {_DIFFERENT}"


@dataclass(frozen=True, slots=True)
class _Arrival:
    spec: ParameterSpec
    ready_s: float


@dataclass(frozen=True, slots=True)
class BackwardNumbers:
    """What steps of one rank with one plan show of a backward. Medians; times are seconds, those of buckets in order.

    Attributes:
        ready_s: when each bucket was complete, since backward began.
        reduction_s: how long each reduction took.
        forward_s: how long forward took.
        backward_s: how long backward took.
        optimizer_s: how long the optimizer's step took.
    """

    ready_s: Sequence[float]
    reduction_s: Sequence[float]
    forward_s: float
    backward_s: float
    optimizer_s: float

    @classmethod
    def of(cls, steps: Sequence[Step]) -> BackwardNumbers | None:
        """Of steps with one plan; None: none of them has reduced anything."""
        seen = [(step, backward) for step in steps if step.buckets and (backward := reduced_backward(step)) is not None]
        if not seen:
            return None
        ready_s = [[bucket.ready_s - backward.start_s for bucket in step.buckets] for step, backward in seen]
        reduction_s = [[reduction.seconds for reduction in step.reductions()] for step, _ in seen]
        return cls(
            ready_s=[statistics.median(times) for times in zip(*ready_s, strict=True)],
            reduction_s=[statistics.median(times) for times in zip(*reduction_s, strict=True)],
            forward_s=statistics.median(step.seconds("forward") for step, _ in seen),
            backward_s=statistics.median(backward.seconds for _, backward in seen),
            optimizer_s=statistics.median(step.seconds("optimizer") for step, _ in seen),
        )

    def profile(self, plan: RecordedPlan, *, num_ranks: int) -> Profile:
        """The backward, with the parameters of `plan`, which the steps have used (Note: profiles from buckets)."""
        arrivals = _arrivals(plan.buckets, self.ready_s)
        return Profile(
            [arrival.spec for arrival in arrivals],
            [arrival.ready_s for arrival in arrivals],
            backward_s=max([self.backward_s, *(arrival.ready_s for arrival in arrivals)]),
            cost=self._cost(plan),
            num_ranks=num_ranks,
            forward_s=self.forward_s,
            optimizer_s=self.optimizer_s,
        )

    def _cost(self, plan: RecordedPlan) -> AllReduceCost | None:
        seconds: dict[int, list[float]] = {}
        for bucket, reduction_s in zip(plan.buckets, self.reduction_s, strict=True):
            if bucket.num_bytes and not bucket.sparse:
                seconds.setdefault(bucket.num_bytes, []).append(reduction_s)
        is_known = bool(seconds) and max(seconds) >= _DIFFERENT * min(seconds)
        return AllReduceCost.fit(seconds) if is_known else None


def profile_of(plan: RecordedPlan, steps: Sequence[Step], *, num_ranks: int) -> Profile | None:
    """What `steps` of one rank show of a backward with `plan`; None: nothing."""
    seen = [step for step in steps if step.plan == plan.version and len(step.buckets) == len(plan.buckets)]
    backward = BackwardNumbers.of(seen)
    return None if backward is None else backward.profile(plan, num_ranks=num_ranks)


def plan_in(profile: Profile, plan: RecordedPlan) -> list[BucketSpec] | None:
    """`plan` by position in `profile`; None: the profile is of other parameters."""
    position = {spec.name: i for i, spec in enumerate(profile.specs)}
    members = [[position.get(name) for name in bucket.parameters] for bucket in plan.buckets]
    if {i for bucket in members for i in bucket} != set(position.values()):
        return None
    return [
        BucketSpec(tuple(i for i in found if i is not None), sparse=bucket.sparse)
        for found, bucket in zip(members, plan.buckets, strict=True)
    ]


def reduced_backward(step: Step) -> Span | None:
    """The backward in which the reductions were launched, up to where the step began to wait; None: there was none."""
    exposed = [i for i, span in enumerate(step.spans) if span.name == "exposed"]
    if not exposed:
        return None
    first = last = exposed[-1]
    while first > 0 and step.spans[first - 1].name in _REDUCING:
        first -= 1
    return Span("backward", step.spans[first].start_s, step.spans[last].start_s)


def _arrivals(buckets: Sequence[RecordedBucket], ready_s: Sequence[float]) -> list[_Arrival]:
    arrivals: list[_Arrival] = []
    before_s = 0.0
    for ready, bucket in sorted(zip(ready_s, buckets, strict=True), key=lambda pair: pair[0]):
        num_bytes = 0
        for name, size in zip(bucket.parameters, bucket.sizes, strict=True):
            num_bytes += size
            share = num_bytes / bucket.num_bytes if bucket.num_bytes else 1.0
            spec = ParameterSpec(name, size, kind="", sparse=bucket.sparse)
            arrivals.append(_Arrival(spec, before_s + (ready - before_s) * share))
        before_s = ready
    return arrivals
