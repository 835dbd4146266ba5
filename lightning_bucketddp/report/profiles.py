"""A profile of a backward from recorded steps, and plans by position in a profile. Pure.

Note: profiles from buckets
    A step that was recorded tells when each bucket was complete, and not when each gradient came. Between the bucket
    before and its own completion, the gradients of a bucket are taken to arrive at an even rate of bytes. What a
    reduction costs is read off the buckets' reductions; these wait for the slowest rank, too, so take the steps of the
    slowest rank if there is a choice.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_bucketddp.core.cost import AllReduceCost
from lightning_bucketddp.core.plan import BucketPlan, ParameterSpec
from lightning_bucketddp.core.profile import Profile
from lightning_bucketddp.report.record import RecordedBucket, RecordedPlan, Span, Step

_REDUCING = ("backward", "exposed")
# Where all buckets are smaller, the time on the wire is lost in the noise; one size that is larger is nearly all wire.
_ALL_LATENCY_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class _Arrival:
    spec: ParameterSpec
    ready_s: float


def profile_of(plan: RecordedPlan, steps: Sequence[Step], *, num_ranks: int) -> Profile | None:
    """What `steps` of one rank show of a backward with `plan`; None: nothing (Note: profiles from buckets)."""
    backwards = {step.step: backward for step in steps if (backward := reduced_backward(step)) is not None}
    seen = [
        step for step in steps if step.plan == plan.version and len(step.buckets) == len(plan.buckets) and step.buckets
    ]
    seen = [step for step in seen if step.step in backwards]
    if not seen:
        return None
    ready_s = [
        statistics.median(step.buckets[i].ready_s - backwards[step.step].start_s for step in seen)
        for i in range(len(plan.buckets))
    ]
    arrivals = _arrivals(plan.buckets, ready_s)
    backward_s = statistics.median(backwards[step.step].seconds for step in seen)
    return Profile(
        [arrival.spec for arrival in arrivals],
        [arrival.ready_s for arrival in arrivals],
        backward_s=max([backward_s, *(arrival.ready_s for arrival in arrivals)]),
        cost=_cost(plan, seen),
        num_ranks=num_ranks,
        forward_s=statistics.median(step.seconds("forward") for step in seen),
        optimizer_s=statistics.median(step.seconds("optimizer") for step in seen),
    )


def plan_in(profile: Profile, plan: RecordedPlan) -> list[BucketPlan] | None:
    """`plan` by position in `profile`; None: the profile is of other parameters."""
    position = {spec.name: i for i, spec in enumerate(profile.specs)}
    members = [[position.get(name) for name in bucket.parameters] for bucket in plan.buckets]
    if {i for bucket in members for i in bucket} != set(position.values()):
        return None
    return [
        BucketPlan(tuple(i for i in found if i is not None), sparse=bucket.sparse)
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


def _cost(plan: RecordedPlan, steps: Sequence[Step]) -> AllReduceCost:
    seconds: dict[int, list[float]] = {}
    for step in steps:
        for bucket, reduction in zip(plan.buckets, step.reductions(), strict=True):
            if bucket.num_bytes and not bucket.sparse:
                seconds.setdefault(bucket.num_bytes, []).append(reduction.seconds)
    if not seconds:
        return AllReduceCost(0.0, 0.0)
    largest = max(seconds)
    if largest < _ALL_LATENCY_BYTES:
        return AllReduceCost(statistics.median(s for times in seconds.values() for s in times), 0.0)
    if len(seconds) == 1:
        return AllReduceCost(0.0, statistics.median(seconds[largest]) / largest)
    return AllReduceCost.fit(seconds)
