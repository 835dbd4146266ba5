"""The typical step of a run, and the backward that its buckets show. Pure.

Note: profiles from buckets
    A recorded step tells when each bucket was complete, not when each gradient arrived. The gradients of a bucket are
    taken to arrive at an even rate of bytes, between the completion of the bucket before and that of their own. The
    cost of a reduction is fitted to the times of the buckets' reductions; these include waiting for the slowest rank,
    so use the steps of the slowest rank if there is a choice. Where bucket sizes differ by less than a factor of 4,
    their times show noise, not the effect of size: such a profile has no cost.

Note: typical step
    Each rank sorts its last 1,000 recorded steps by length and averages the middle third. So phases add up to the
    step, which their medians would not, and outliers count as little as in a median. The run's typical step is the
    mean over the ranks.

    A rank is a straggler if its own time, without waiting, exceeds the median of the others' by more than 3% and by
    more than three standard errors. If there is one, the others wait for it and for the network, and it waits for the
    network alone. If there is none, all wait for the network alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean, median
from typing import Any

from lightning_bucketddp.planning.cost import AllReduceCost, Profile
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec
from lightning_bucketddp.planning.simulation import cost_until
from lightning_bucketddp.recording.schema import (
    ALL_REDUCE,
    WAITS,
    RecordedBucket,
    RecordedPlan,
    Run,
    Span,
    Step,
    bandwidth_of,
    overlap_of,
)

_REDUCING = ("backward", "exposed")
_DIFFERENT = 4
# Completes an error message or a note on why a profile has no cost.
NO_COST = f"the sizes of its buckets differ by less than a factor of {_DIFFERENT}"


@dataclass(frozen=True, slots=True)
class BackwardNumbers:
    """The backward that steps of one rank with one plan show: medians, those of buckets in order.

    `ready_s` is when a bucket was complete, counted from the start of backward; the others are durations.
    """

    ready_s: Sequence[float]
    reduction_s: Sequence[float]
    forward_s: float
    backward_s: float
    optimizer_s: float

    @classmethod
    def of(cls, steps: Sequence[Step]) -> BackwardNumbers | None:
        """Return the medians over `steps`, which have one plan; None if none of them reduced anything."""
        seen = [(step, backward) for step in steps if step.buckets and (backward := reduced_backward(step)) is not None]
        if not seen:
            return None
        ready_s = [[bucket.ready_s - backward.start_s for bucket in step.buckets] for step, backward in seen]
        reduction_s = [[reduction.seconds for reduction in step.reductions()] for step, _ in seen]
        return cls(
            ready_s=[median(times) for times in zip(*ready_s, strict=True)],
            reduction_s=[median(times) for times in zip(*reduction_s, strict=True)],
            forward_s=median(step.seconds("forward") for step, _ in seen),
            backward_s=median(backward.seconds for _, backward in seen),
            optimizer_s=median(step.seconds("optimizer") for step, _ in seen),
        )

    def profile(self, plan: RecordedPlan, *, num_ranks: int) -> Profile:
        """Return the profile, with the parameters of `plan`, which the steps used (Note: profiles from buckets)."""
        arrivals = _arrivals(plan.buckets, self.ready_s)
        return Profile(
            list(arrivals),
            list(arrivals.values()),
            backward_s=max([self.backward_s, *arrivals.values()]),
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
    """Return the profile that `steps` of one rank with `plan` show, with the cost of an all-reduce.

    None if there are no such steps.
    """
    seen = [step for step in steps if step.plan == plan.version and len(step.buckets) == len(plan.buckets)]
    backward = BackwardNumbers.of(seen)
    if backward is None:
        return None
    profile = backward.profile(plan, num_ranks=num_ranks)
    if profile.cost is None or all(bucket.collective == ALL_REDUCE for bucket in plan.buckets):
        return profile
    return replace(profile, cost=profile.cost.slower(2))  # than what was recorded (Note: halves)


def plan_in(profile: Profile, plan: RecordedPlan) -> list[BucketSpec] | None:
    """Return `plan` by position in `profile`; None if the profile is of other parameters."""
    position = {spec.name: i for i, spec in enumerate(profile.specs)}
    if {name for bucket in plan.buckets for name in bucket.parameters} != position.keys():
        return None
    return [BucketSpec(tuple(position[name] for name in b.parameters), sparse=b.sparse) for b in plan.buckets]


def reduced_backward(step: Step) -> Span | None:
    """Return the backward that launched the reductions, up to where the step began to wait; None if there is none."""
    exposed = [i for i, span in enumerate(step.spans) if span.name == "exposed"]
    if not exposed:
        return None
    first = last = exposed[-1]
    while first > 0 and step.spans[first - 1].name in _REDUCING:
        first -= 1
    return Span("backward", step.spans[first].start_s, step.spans[last].start_s)


def _arrivals(buckets: Sequence[RecordedBucket], ready_s: Sequence[float]) -> dict[ParameterSpec, float]:
    """Return each parameter with the time its gradient is taken to arrive."""
    arrivals: dict[ParameterSpec, float] = {}
    before_s = 0.0
    for ready, bucket in sorted(zip(ready_s, buckets, strict=True), key=lambda pair: pair[0]):
        for name, size, so_far in zip(bucket.parameters, bucket.sizes, accumulate(bucket.sizes), strict=True):
            share = so_far / bucket.num_bytes if bucket.num_bytes else 1.0
            spec = ParameterSpec(name, size, kind="", sparse=bucket.sparse)
            arrivals[spec] = before_s + (ready - before_s) * share
        before_s = ready
    return arrivals


PHASES = ("data", "forward", "backward", "exposed", "optimizer", "weights")
# Only the last ones of each rank count.
NUM_STEPS = 1000
_LATE_BY = 0.03
_NUM_ERRORS = 3


def waiting_s(phases: Mapping[str, float]) -> float:
    """Return how much of a step with these phases is spent waiting for other ranks."""
    return sum(phases.get(phase, 0.0) for phase in WAITS)


def _without_idle(phases: dict[str, float]) -> dict[str, float]:
    """Return `phases` without waiting for weights where no step does that: nothing is sharded."""
    return {phase: seconds for phase, seconds in phases.items() if phase != "weights" or seconds > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNumbers:
    """The typical step of one rank (Note: typical step). Times are seconds."""

    rank: int
    host: str
    num_steps: int  # how many recorded steps count
    phases: dict[str, float]
    own_error_s: float = 0.0  # the standard error of `own_s`
    communication_s: float = 0.0
    exchange_s: float = 0.0  # the part of it in which weights travel
    bytes_on_wire: float = 0.0
    memory_bytes: int = 0
    waits: Sequence[float] = ()  # by bucket of the last plan: the share of the exposed time in which its reduction ran
    backward: BackwardNumbers | None = None  # of steps with the last plan; None if nothing was reduced

    @classmethod
    def of(cls, run: Run, steps: Sequence[Step]) -> RankNumbers:
        """Return the typical step of the rank that recorded `steps`."""
        steps = steps[-NUM_STEPS:]
        middle = _middle(steps)
        last = [s for s in steps if s.plan == steps[-1].plan and len(s.buckets) == len(steps[-1].buckets)]
        return cls(
            rank=run.rank,
            host=run.host,
            num_steps=len(steps),
            phases=_without_idle({phase: fmean([step.seconds(phase) for step in middle] or [0.0]) for phase in PHASES}),
            own_error_s=_error([step.own_s for step in steps]),
            communication_s=fmean([step.communication_s for step in middle] or [0.0]),
            exchange_s=fmean([sum(span.seconds for span in step.exchanges()) for step in middle] or [0.0]),
            bytes_on_wire=fmean([step.bytes_on_wire for step in middle] or [0.0]),
            memory_bytes=max((step.memory_bytes for step in steps), default=0),
            waits=_waits(_middle(last)),
            backward=BackwardNumbers.of(last),
        )

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> RankNumbers:
        """Return the numbers that `asdict` made this `content` of."""
        backward = content.pop("backward")
        return cls(**content, backward=None if backward is None else BackwardNumbers(**backward))

    @property
    def step_s(self) -> float:
        return sum(self.phases.values())

    @property
    def exposed_s(self) -> float:
        return waiting_s(self.phases)

    @property
    def own_s(self) -> float:
        """Return the time of the step without waiting for other ranks."""
        return self.step_s - self.exposed_s


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that the others wait for, and how much longer it takes than they do."""

    rank: RankNumbers
    by_s: float


@dataclass(frozen=True, slots=True)
class TypicalStep:
    """The typical step of a run, made of those of the ranks that are known (Note: typical step)."""

    ranks: Sequence[RankNumbers]  # at least one
    num_ranks: int  # of the run

    @property
    def phases(self) -> dict[str, float]:
        return _without_idle({phase: fmean(rank.phases.get(phase, 0.0) for rank in self.ranks) for phase in PHASES})

    @property
    def step_s(self) -> float:
        return sum(self.phases.values())

    @property
    def exposed_s(self) -> float:
        return waiting_s(self.phases)

    @property
    def communication_s(self) -> float:
        return fmean(rank.communication_s for rank in self.ranks)

    @property
    def exchange_s(self) -> float:
        return fmean(rank.exchange_s for rank in self.ranks)

    @property
    def overlap(self) -> float:
        return overlap_of(self.exposed_s, self.communication_s)

    @property
    def bytes_on_wire(self) -> float:
        return fmean(rank.bytes_on_wire for rank in self.ranks)

    @property
    def bandwidth(self) -> float:
        return bandwidth_of(self.bytes_on_wire, self.communication_s, num_ranks=self.num_ranks)

    @property
    def straggler(self) -> Straggler | None:
        slowest = max(self.ranks, key=lambda rank: rank.own_s)
        others = [rank.own_s for rank in self.ranks if rank is not slowest]
        if not others:
            return None
        usual_s = median(others)
        noise_s = max(_LATE_BY * usual_s, _NUM_ERRORS * max(rank.own_error_s for rank in self.ranks))
        by_s = slowest.own_s - usual_s
        return Straggler(slowest, by_s) if by_s > noise_s else None

    @property
    def network_wait_s(self) -> float:
        """Return how long steps wait for the network alone: the exposed time, that of the straggler if there is one."""
        return waiting_s(self._network_phases)

    @property
    def _network_phases(self) -> dict[str, float]:
        return self.phases if self.straggler is None else self.straggler.rank.phases

    @property
    def late_bucket(self) -> tuple[int, float] | None:
        """Return the index of the bucket of the last plan that steps wait for longest, and for how many seconds."""
        num_buckets = min(len(rank.waits) for rank in self.ranks)
        waits = [fmean(rank.waits[i] * rank.phases["exposed"] for rank in self.ranks) for i in range(num_buckets)]
        return max(enumerate(waits), key=lambda late: late[1]) if any(waits) else None

    def profile(self, plan: RecordedPlan, measured: Profile | None) -> Profile | None:
        """Return the backward to simulate other plans with; None if it is not known.

        It is the one that was `measured` for `bucket_cap_mb="auto"`, with the costs used there, so that a simulation
        repeats what was predicted then. Without one it is made of the recorded buckets, with costs that explain how
        long the steps with `plan` wait for the network.
        """
        if measured is not None and plan_in(measured, plan) is not None:
            return measured
        rank = self.straggler.rank if self.straggler is not None else self.ranks[0]
        if rank.backward is None or len(rank.backward.ready_s) != len(plan.buckets):
            return None
        return self.fitted(rank.backward.profile(plan, num_ranks=self.num_ranks), plan)

    def fitted(self, profile: Profile, plan: RecordedPlan) -> Profile:
        """Return `profile` with costs that explain how long steps with `plan` wait for reductions."""
        positions = plan_in(profile, plan)
        if profile.cost is None or positions is None:
            return profile
        end_s = profile.backward_s + self._network_phases["exposed"]
        return replace(profile, cost=cost_until(profile, positions, end_s=end_s))


def _middle(steps: Sequence[Step]) -> Sequence[Step]:
    """Return the middle third by length; all if there are two or fewer."""
    cut = len(steps) // 3
    return sorted(steps, key=lambda step: step.step_s)[cut : len(steps) - cut]


def _waits(steps: Sequence[Step]) -> list[float]:
    """Return, by bucket, the share of the exposed time in which its reduction ran."""
    exposed_s = sum(step.seconds("exposed") for step in steps)
    waits = [step.waits() for step in steps]
    return [sum(by_bucket) / exposed_s if exposed_s > 0 else 0.0 for by_bucket in zip(*waits, strict=True)]


def _error(seconds: Sequence[float]) -> float:
    """Return the standard error of the median, estimated from the median deviation because of outliers."""
    if not seconds:
        return 0.0
    middle = median(seconds)
    deviation = median(abs(s - middle) for s in seconds)
    return float(1.48 * deviation / math.sqrt(len(seconds)))
