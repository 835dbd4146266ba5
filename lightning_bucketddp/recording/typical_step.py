"""The typical step of a run, and the backward of its buckets. Pure.

Note: typical step
    Each rank sorts its last 1,000 recorded steps by length and averages the middle third. So phases add up to the
    step, unlike their medians, and outliers count as little as in a median. The run's typical step is the mean over the
    ranks.

    A rank is a straggler if its own time, without waiting, exceeds the median of the others' by more than 3% and by
    more than three standard errors. If there is one, the others wait for it and for the network, and it waits for the
    network alone. If there is none, all wait for the network alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean, median
from typing import Any

from lightning_bucketddp.planning.cost import AllReduceCost, Profile, cost_until
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec
from lightning_bucketddp.recording.schema import (
    ALL_REDUCE,
    PHASES,
    WAITS,
    RecordedPlan,
    Run,
    Span,
    Step,
    bandwidth_of,
    overlap_of,
)

_DIFFERENT = 4
# Ends a message about a profile without a cost: with similar sizes the times show noise, not the effect of size.
NO_COST = f"the sizes of its buckets differ by less than a factor of {_DIFFERENT}"
# So many steps of each rank count, the last ones.
NUM_STEPS = 1000


@dataclass(frozen=True, slots=True)
class BackwardNumbers:
    """The backward in steps of one rank with one plan: medians, for buckets in order."""

    ready_s: Sequence[float]  # when a bucket was complete, counted from the start of backward
    reduction_s: Sequence[float]
    forward_s: float
    backward_s: float
    optimizer_s: float

    @classmethod
    def of(cls, steps: Sequence[Step]) -> BackwardNumbers | None:
        """Return the medians over `steps`, which have one plan; None if nothing was reduced in them."""
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
        """Return the profile, with the parameters of `plan`, which the steps used.

        It assumes that the gradients of a bucket arrive at an even rate of bytes between the completion of the bucket
        before and that of their own. The cost is fitted to the times of the reductions, which include waiting for the
        slowest rank: use the steps of the slowest rank if there is a choice.
        """
        arrivals: dict[ParameterSpec, float] = {}
        before_s = 0.0
        for ready, bucket in sorted(zip(self.ready_s, plan.buckets, strict=True), key=lambda pair: pair[0]):
            for name, size, so_far in zip(bucket.parameters, bucket.sizes, accumulate(bucket.sizes), strict=True):
                share = so_far / bucket.num_bytes if bucket.num_bytes else 1.0
                spec = ParameterSpec(name, size, kind="", sparse=bucket.sparse)
                arrivals[spec] = before_s + (ready - before_s) * share
            before_s = ready
        seconds: dict[int, list[float]] = {}
        for bucket, reduction_s in zip(plan.buckets, self.reduction_s, strict=True):
            if bucket.num_bytes and not bucket.sparse:
                seconds.setdefault(bucket.num_bytes, []).append(reduction_s)
        has_cost = bool(seconds) and max(seconds) >= _DIFFERENT * min(seconds)
        return Profile(
            list(arrivals),
            list(arrivals.values()),
            backward_s=max([self.backward_s, *arrivals.values()]),
            cost=AllReduceCost.fit(seconds) if has_cost else None,
            num_ranks=num_ranks,
            forward_s=self.forward_s,
            optimizer_s=self.optimizer_s,
        )


def profile_of(plan: RecordedPlan, steps: Sequence[Step], *, num_ranks: int) -> Profile | None:
    """Return the profile in those `steps` of one rank that used `plan`, with the cost of an all-reduce, or None."""
    seen = [step for step in steps if step.plan == plan.version and len(step.buckets) == len(plan.buckets)]
    backward = BackwardNumbers.of(seen)
    if backward is None:
        return None
    profile = backward.profile(plan, num_ranks=num_ranks)
    if profile.cost is None or all(bucket.collective == ALL_REDUCE for bucket in plan.buckets):
        return profile
    return replace(profile, cost=profile.cost.slower(2))  # Note: halves


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
    while first > 0 and step.spans[first - 1].name in ("backward", "exposed"):
        first -= 1
    return Span("backward", step.spans[first].start_s, step.spans[last].start_s)


def mean_phases(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the means, without the phase `weights` if no step has it: nothing is sharded."""
    steps = list(steps)
    means = {phase: fmean([phases.get(phase, 0.0) for phases in steps] or [0.0]) for phase in PHASES}
    return {phase: seconds for phase, seconds in means.items() if phase != "weights" or seconds > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """A typical step (Note: typical step). Times are seconds."""

    phases: dict[str, float]
    communication_s: float = 0.0
    exchange_s: float = 0.0  # the part of the communication in which weights travel
    bytes_on_wire: float = 0.0

    @property
    def step_s(self) -> float:
        return sum(self.phases.values())

    @property
    def exposed_s(self) -> float:
        """Return how much of the step is spent waiting for other ranks."""
        return sum(self.phases.get(phase, 0.0) for phase in WAITS)

    @property
    def own_s(self) -> float:
        return self.step_s - self.exposed_s

    @property
    def computing_s(self) -> float:
        return self.phases["forward"] + self.phases["backward"]

    @property
    def overlap(self) -> float:
        return overlap_of(self.exposed_s, self.communication_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNumbers(StepNumbers):
    """The typical step of one rank."""

    rank: int
    host: str
    num_steps: int
    num_replayed: int = 0  # steps that were replayed as CUDA graphs
    lag_s: float | None = None  # how far the device was behind the host at the end of backward; None: not known
    own_error_s: float = 0.0  # the standard error of `own_s`
    step_error_s: float = 0.0  # the standard error of `step_s`
    memory_bytes: int = 0
    waits: Sequence[float] = ()  # by bucket of the last plan: the share of the exposed time in which its reduction ran
    backward: BackwardNumbers | None = None  # of steps with the last plan; None if nothing was reduced

    @classmethod
    def of(cls, run: Run, steps: Sequence[Step]) -> RankNumbers:
        steps = steps[-NUM_STEPS:]
        middle = _middle(steps)
        # The last three count: the first steps load kernels, and choose among them.
        lags = [step.lag_s for step in steps if step.lag_s is not None and not step.num_replayed][-3:]
        last = [s for s in steps if s.plan == steps[-1].plan and len(s.buckets) == len(steps[-1].buckets)]

        def mean(values: Iterable[float]) -> float:
            return fmean([*values] or [0.0])

        return cls(
            rank=run.rank,
            host=run.host,
            num_steps=len(steps),
            num_replayed=sum(step.num_replayed > 0 for step in steps),
            lag_s=median(lags) if lags else None,
            phases=mean_phases({phase: step.seconds(phase) for phase in PHASES} for step in middle),
            own_error_s=_error([step.own_s for step in steps]),
            step_error_s=_error([step.step_s for step in steps]),
            communication_s=mean(step.communication_s for step in middle),
            exchange_s=mean(sum(span.seconds for span in step.exchanges()) for step in middle),
            bytes_on_wire=mean(step.bytes_on_wire for step in middle),
            memory_bytes=max((step.memory_bytes for step in steps), default=0),
            waits=_waits(_middle(last)),
            backward=BackwardNumbers.of(last),
        )

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> RankNumbers:
        """Return the numbers from the result of `asdict`."""
        backward = content.pop("backward")
        return cls(**content, backward=None if backward is None else BackwardNumbers(**backward))


@dataclass(frozen=True, slots=True, kw_only=True)
class TypicalStep(StepNumbers):
    """The typical step of a run."""

    ranks: Sequence[RankNumbers]  # at least one
    run: Run
    plan: RecordedPlan | None  # of the last steps
    measured: Profile | None  # the backward that `bucket_cap_mb="auto"` measured, if it did

    @classmethod
    def of(
        cls, ranks: Sequence[RankNumbers], run: Run, plan: RecordedPlan | None = None, measured: Profile | None = None
    ) -> TypicalStep:
        return cls(
            ranks=ranks,
            run=run,
            plan=plan,
            measured=measured,
            phases=mean_phases(rank.phases for rank in ranks),
            communication_s=fmean(rank.communication_s for rank in ranks),
            exchange_s=fmean(rank.exchange_s for rank in ranks),
            bytes_on_wire=fmean(rank.bytes_on_wire for rank in ranks),
        )

    @property
    def bandwidth(self) -> float:
        return bandwidth_of(self.bytes_on_wire, self.communication_s, num_ranks=self.run.num_averaging)

    @property
    def straggler(self) -> tuple[RankNumbers, float] | None:
        """Return the rank that the others wait for, and how many seconds longer it takes than they do."""
        slowest = max(self.ranks, key=lambda rank: rank.own_s)
        others = [rank.own_s for rank in self.ranks if rank is not slowest]
        if not others:
            return None
        usual_s = median(others)
        noise_s = max(0.03 * usual_s, 3 * max(rank.own_error_s for rank in self.ranks))
        by_s = slowest.own_s - usual_s
        return (slowest, by_s) if by_s > noise_s else None

    @property
    def is_host_bound(self) -> bool | None:
        """Return whether the device waits for Python in forward and backward; None if that was not measured."""
        lags = [rank.lag_s for rank in self.ranks if rank.lag_s is not None]
        return max(lags) < 0.05 * self.computing_s if lags else None

    @property
    def unhindered(self) -> StepNumbers:
        """Return a step that waits for the network alone: the straggler's if there is one."""
        return self if self.straggler is None else self.straggler[0]

    @property
    def late_bucket(self) -> tuple[int, float] | None:
        """Return the index of the bucket of the last plan that steps wait for longest, and for how many seconds."""
        num_buckets = min(len(rank.waits) for rank in self.ranks)
        waits = [fmean(rank.waits[i] * rank.phases["exposed"] for rank in self.ranks) for i in range(num_buckets)]
        return max(enumerate(waits), key=lambda late: late[1]) if any(waits) else None

    def profile(self) -> Profile | None:
        """Return the backward to simulate other plans with; None if it is not known.

        It is the `measured` one, so that a simulation repeats the predictions of the run; or else one made of the
        recorded buckets, with costs that explain how long steps wait for the network.
        """
        if self.plan is None:
            return None
        if self.measured is not None and plan_in(self.measured, self.plan) is not None:
            return self.measured
        rank = self.straggler[0] if self.straggler is not None else self.ranks[0]
        if rank.backward is None or len(rank.backward.ready_s) != len(self.plan.buckets):
            return None
        profile = rank.backward.profile(self.plan, num_ranks=self.run.num_averaging)
        positions = plan_in(profile, self.plan)
        if profile.cost is None or positions is None:
            return profile
        return replace(profile, cost=self.fitted_cost(profile, positions))

    def fitted_cost(self, profile: Profile, plan: Sequence[BucketSpec]) -> AllReduceCost:
        """Return a cost that explains how long steps with `plan` wait for reductions."""
        return cost_until(profile, plan, end_s=profile.backward_s + self.unhindered.phases["exposed"])


def _middle(steps: Sequence[Step]) -> Sequence[Step]:
    """Return the middle third by length; all if there are two or fewer."""
    cut = len(steps) // 3
    return sorted(steps, key=lambda step: step.step_s)[cut : len(steps) - cut]


def _waits(steps: Sequence[Step]) -> list[float]:
    """Return, by bucket, the share of the exposed time in which its reduction ran; all steps have one plan."""
    exposed_s = sum(step.seconds("exposed") for step in steps)
    waits = [0.0] * (len(steps[0].buckets) if steps else 0)
    for step in steps:
        exposed = [span for span in step.spans if span.name == "exposed"]
        for index, reduction in enumerate(step.reductions()):
            waits[index] += sum(
                max(min(span.end_s, reduction.end_s) - max(span.start_s, reduction.start_s), 0.0) for span in exposed
            )
    return [wait_s / exposed_s if exposed_s > 0 else 0.0 for wait_s in waits]


def _error(seconds: Sequence[float]) -> float:
    """Return the standard error of the median, estimated from the median deviation because of outliers."""
    if not seconds:
        return 0.0
    middle = median(seconds)
    deviation = median(abs(s - middle) for s in seconds)
    return float(1.48 * deviation / math.sqrt(len(seconds)))
