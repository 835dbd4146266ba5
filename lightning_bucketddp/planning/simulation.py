"""Simulating one step with a plan: when its reductions run. Pure.

Note: timeline
    Reductions run one after the other, in launch order: one begins when its bucket is complete and the one before has
    ended. What has not arrived is complete when backward ends. A sparse gradient is exchanged after backward and costs
    the latency only, because nobody knows its size in advance. The flags in the last bucket, and the few bytes between
    gradients, are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_bucketddp.planning.all_reduce_cost import AllReduceCost
from lightning_bucketddp.planning.backward_profile import Profile
from lightning_bucketddp.planning.plan import BucketSpec

_LARGEST_SCALE = 4.0


@dataclass(frozen=True, slots=True)
class SimulatedBucket:
    """One reduction. Times are seconds since backward began."""

    num_bytes: int
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step, simulated (Note: timeline)."""

    buckets: Sequence[SimulatedBucket]
    forward_s: float
    backward_s: float
    optimizer_s: float

    @property
    def end_s(self) -> float:
        """Return when the last reduction and backward have ended."""
        return max(self.backward_s, self.buckets[-1].end_s) if self.buckets else self.backward_s

    @property
    def exposed_s(self) -> float:
        """Return how long the step waits for reductions after backward."""
        return self.end_s - self.backward_s

    @property
    def compute_s(self) -> float:
        """Return how long the step would take without communication."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s

    @property
    def communication_s(self) -> float:
        """Return how long reductions run."""
        return sum(bucket.end_s - bucket.start_s for bucket in self.buckets)

    @property
    def overlap(self) -> float:
        """Return the share of communication that is hidden behind backward; 1 if there is no communication."""
        return 1 - self.exposed_s / self.communication_s if self.communication_s > 0 else 1.0

    @property
    def scaling_efficiency(self) -> float:
        """Return the share of a step that is not spent waiting for others."""
        return self.compute_s / self.step_s if self.step_s > 0 else 1.0


def simulate(profile: Profile, plan: Sequence[BucketSpec], cost: AllReduceCost) -> Timeline:
    """Return the step that `plan` makes of the backward in `profile`, with an all-reduce that costs `cost`."""
    buckets: list[SimulatedBucket] = []
    ready = end = 0.0
    for bucket in plan:
        num_bytes = 0 if bucket.sparse else sum(profile.specs[i].num_bytes for i in bucket.members)
        # Buckets leave by index: one that is complete waits for those before it.
        ready = max(ready, _ready(profile, bucket))
        start = max(ready, end)
        end = start + cost.seconds(num_bytes)
        buckets.append(SimulatedBucket(num_bytes, ready, start, end))
    return Timeline(buckets, profile.forward_s, profile.backward_s, profile.optimizer_s)


def cost_until(profile: Profile, plan: Sequence[BucketSpec], *, end_s: float) -> AllReduceCost:
    """Return the cost in `profile`, scaled by the largest factor, within bounds, with which `plan` ends by `end_s`."""
    assert profile.cost is not None
    low, high = 1 / _LARGEST_SCALE, _LARGEST_SCALE
    for _ in range(20):
        middle = (low * high) ** 0.5
        if simulate(profile, plan, profile.cost.slower(middle)).end_s <= end_s:
            low = middle
        else:
            high = middle
    return profile.cost.slower(low)


def _ready(profile: Profile, bucket: BucketSpec) -> float:
    all_arrived = all(i < len(profile.ready_s) for i in bucket.members)
    if bucket.sparse or not bucket.members or not all_arrived:
        return profile.backward_s
    return max(profile.ready_s[i] for i in bucket.members)
