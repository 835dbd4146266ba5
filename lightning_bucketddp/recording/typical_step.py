"""The typical step of a run: where the numbers of the summary and of the page come from. Pure.

Note: typical step
    Each rank orders its last 1,000 recorded steps by length and averages the third in the middle. So phases add up to
    the step, which their medians would not, and what happened once counts as little as in a median. The run's typical
    step is the mean over the ranks.

    A rank is a straggler if what it takes for itself is longer than what the others take (their median) by more than 3%
    and by more than three standard errors. If there is one, the others wait for it and the network, and it waits for
    the network alone. If there is none, all wait for the network alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_bucketddp.planning.all_reduce_cost import share_of_a_link
from lightning_bucketddp.planning.backward_profile import Profile
from lightning_bucketddp.planning.simulation import cost_until
from lightning_bucketddp.recording.marked_steps import seconds_of
from lightning_bucketddp.recording.profiles import BackwardNumbers, plan_in
from lightning_bucketddp.recording.record import RecordedPlan, Run, Step

PHASES = ("data", "forward", "backward", "exposed", "optimizer")
# So many steps of each rank count, the last ones.
NUM_STEPS = 1000
_LATE_BY = 0.03
_NUM_ERRORS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNumbers:
    """The typical step of one rank (Note: typical step). Times are seconds.

    Attributes:
        rank: whose it is.
        host: on which machine.
        num_steps: of how many recorded steps it was made.
        phases: the time of each phase.
        own_error_s: the standard error of the time that the rank takes for itself.
        communication_s: how long reductions ran.
        bytes_on_wire: what the rank gave to reductions.
        memory_bytes: the most memory that was in use.
        waits: by bucket of the last plan, the share of the exposed time in which its reduction ran.
        backward: of the last plan; None: nothing was reduced.
    """

    rank: int
    host: str
    num_steps: int
    phases: dict[str, float]
    own_error_s: float = 0.0
    communication_s: float = 0.0
    bytes_on_wire: float = 0.0
    memory_bytes: int = 0
    waits: Sequence[float] = ()
    backward: BackwardNumbers | None = None

    @classmethod
    def of(cls, run: Run, steps: Sequence[Step]) -> RankNumbers:
        steps = steps[-NUM_STEPS:]
        middle = _middle(steps)
        of_last_plan = [
            step for step in steps if step.plan == steps[-1].plan and len(step.buckets) == len(steps[-1].buckets)
        ]
        return cls(
            rank=run.rank,
            host=run.host,
            num_steps=len(steps),
            phases={phase: _mean([step.seconds(phase) for step in middle]) for phase in PHASES},
            own_error_s=_error([seconds_of(step) - step.exposed_s for step in steps]),
            communication_s=_mean([step.communication_s for step in middle]),
            bytes_on_wire=_mean([step.bytes_on_wire for step in middle]),
            memory_bytes=max((step.memory_bytes for step in steps), default=0),
            waits=_waits(_middle(of_last_plan)),
            backward=BackwardNumbers.of(of_last_plan),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> RankNumbers:
        backward = content.pop("backward")
        return cls(**content, backward=None if backward is None else BackwardNumbers(**backward))

    @property
    def step_s(self) -> float:
        return sum(self.phases.values())

    @property
    def exposed_s(self) -> float:
        return self.phases["exposed"]

    @property
    def own_s(self) -> float:
        """What the rank takes for itself, without waiting for others."""
        return self.step_s - self.exposed_s


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that the others wait for, and by how much it takes longer than they do."""

    rank: RankNumbers
    by_s: float


@dataclass(frozen=True, slots=True)
class LateBucket:
    """The bucket of the last plan that steps wait for longest, and how long."""

    index: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class TypicalStep:
    """The typical step of a run (Note: typical step).

    Attributes:
        ranks: that of each rank that is known, which is one at least.
        num_ranks: how many ranks the run had.
    """

    ranks: Sequence[RankNumbers]
    num_ranks: int

    @property
    def phases(self) -> dict[str, float]:
        return {phase: statistics.fmean(rank.phases[phase] for rank in self.ranks) for phase in PHASES}

    @property
    def step_s(self) -> float:
        return sum(self.phases.values())

    @property
    def exposed_s(self) -> float:
        return self.phases["exposed"]

    @property
    def communication_s(self) -> float:
        return statistics.fmean(rank.communication_s for rank in self.ranks)

    @property
    def overlap(self) -> float:
        """The share of communication that is hidden; 1 if there is none."""
        return min(max(1 - self.exposed_s / self.communication_s, 0.0), 1.0) if self.communication_s > 0 else 1.0

    @property
    def bytes_on_wire(self) -> float:
        return statistics.fmean(rank.bytes_on_wire for rank in self.ranks)

    @property
    def bandwidth(self) -> float:
        """Bytes per second that each rank's link carries while reductions run (Note: cost of an all-reduce)."""
        on_link = share_of_a_link(self.num_ranks) * self.bytes_on_wire
        return on_link / self.communication_s if self.communication_s > 0 else 0.0

    @property
    def straggler(self) -> Straggler | None:
        slowest = max(self.ranks, key=lambda rank: rank.own_s)
        others = [rank.own_s for rank in self.ranks if rank is not slowest]
        if not others:
            return None
        usual_s = statistics.median(others)
        noise_s = max(_LATE_BY * usual_s, _NUM_ERRORS * max(rank.own_error_s for rank in self.ranks))
        by_s = slowest.own_s - usual_s
        return Straggler(slowest, by_s) if by_s > noise_s else None

    @property
    def network_wait_s(self) -> float:
        """How long steps wait for the network alone: the exposed time, that of the straggler if there is one."""
        return self.straggler.rank.exposed_s if self.straggler is not None else self.exposed_s

    @property
    def late_bucket(self) -> LateBucket | None:
        num_buckets = min(len(rank.waits) for rank in self.ranks)
        waits = [statistics.fmean(rank.waits[i] * rank.exposed_s for rank in self.ranks) for i in range(num_buckets)]
        return LateBucket(waits.index(max(waits)), max(waits)) if any(waits) else None

    def profile(self, plan: RecordedPlan, measured: Profile | None) -> Profile | None:
        """The backward that other plans are simulated with; None: nothing is known of it.

        It is the one that was `measured` for `bucket_cap_mb="auto"`, with the costs that this has reckoned with: so
        the simulation tells of the plans what was expected of them then. Otherwise it is made of the recorded buckets,
        with costs that explain how long the steps with `plan` wait for the network.
        """
        if measured is not None and plan_in(measured, plan) is not None:
            return measured
        rank = self.straggler.rank if self.straggler is not None else self.ranks[0]
        if rank.backward is None or len(rank.backward.ready_s) != len(plan.buckets):
            return None
        return self.fitted(rank.backward.profile(plan, num_ranks=self.num_ranks), plan)

    def fitted(self, profile: Profile, plan: RecordedPlan) -> Profile:
        """`profile` with costs that explain how long steps with `plan` wait for the network."""
        positions = plan_in(profile, plan)
        if profile.cost is None or positions is None:
            return profile
        return replace(profile, cost=cost_until(profile, positions, end_s=profile.backward_s + self.network_wait_s))


def _middle(steps: Sequence[Step]) -> Sequence[Step]:
    """The third in the middle, by length; all, if there are two or less."""
    cut = len(steps) // 3
    return sorted(steps, key=seconds_of)[cut : len(steps) - cut]


def _waits(steps: Sequence[Step]) -> list[float]:
    exposed_s = sum(step.exposed_s for step in steps)
    waits = [step.waits() for step in steps]
    return [sum(by_bucket) / exposed_s if exposed_s > 0 else 0.0 for by_bucket in zip(*waits, strict=True)]


def _error(seconds: Sequence[float]) -> float:
    """The standard error of the middle of `seconds`, from the median deviation: some are far off for no reason."""
    if not seconds:
        return 0.0
    middle = statistics.median(seconds)
    deviation = statistics.median(abs(s - middle) for s in seconds)
    return float(1.48 * deviation / math.sqrt(len(seconds)))


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
