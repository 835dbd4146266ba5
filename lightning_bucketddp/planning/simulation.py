"""Simulating one step with a plan: when its reductions run. Pure.

Note: timeline
    Reductions run one after the other, in launch order: one begins when its bucket is complete and the one before has
    ended. What has not arrived is complete when backward ends. A sparse gradient is exchanged after backward and costs
    the latency only, because nobody knows its size in advance. The flags in the last bucket, and the few bytes between
    gradients, are not counted.

    A bucket that travels as another dtype is encoded when it is complete, which makes backward late by as much. When
    backward has ended, buckets are decoded in launch order, each as soon as it has come. Both count as waiting.

    A bucket that is sharded is reduce-scattered, and all-gathered at the end of the optimizer's step, which waits for
    it (Note: halves). That the optimizer then steps fewer parameters is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_bucketddp.planning.cost import NO_CODEC, AllReduceCost, Codec, Profile
from lightning_bucketddp.planning.plan import BucketSpec

_LARGEST_SCALE = 4.0


@dataclass(frozen=True, slots=True)
class SimulatedBucket:
    """One reduction, or gather of weights. Times are seconds since backward began, or the gathers."""

    num_bytes: int
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step with a plan, simulated (Note: timeline); `gathers` are those of the weights that it has changed."""

    plan: Sequence[BucketSpec]  # by position in the profile
    buckets: Sequence[SimulatedBucket]
    forward_s: float
    backward_s: float
    optimizer_s: float
    gathers: Sequence[SimulatedBucket] = ()
    decoded_s: float = 0.0  # when the last bucket was decoded, counted from the start of backward

    @property
    def end_s(self) -> float:
        """Return when backward and the last reduction have ended, and all is decoded."""
        return max([self.backward_s, self.decoded_s, *(bucket.end_s for bucket in self.buckets[-1:])])

    @property
    def exposed_s(self) -> float:
        """Return how long the step waits for reductions after backward, and for weights at its end."""
        return self.end_s - self.backward_s + self.weights_s

    @property
    def weights_s(self) -> float:
        return self.gathers[-1].end_s if self.gathers else 0.0

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s

    @property
    def communication_s(self) -> float:
        return sum(bucket.end_s - bucket.start_s for bucket in (*self.buckets, *self.gathers))

    @property
    def overlap(self) -> float:
        """Return the share of communication that is hidden behind computation; 1 if there is no communication."""
        return 1 - self.exposed_s / self.communication_s if self.communication_s > 0 else 1.0

    @property
    def scaling_efficiency(self) -> float:
        """Return the share of a step that is not spent waiting for others."""
        return self.compute_s / self.step_s if self.step_s > 0 else 1.0


def simulate(
    profile: Profile,
    plan: Sequence[BucketSpec],
    cost: AllReduceCost,
    *,
    cost_of_weights: AllReduceCost | None = None,
    codec: Codec = NO_CODEC,
) -> Timeline:
    """Return the step that `plan` makes of the backward in `profile`; `cost` is that of an all-reduce of gradients."""
    buckets: list[SimulatedBucket] = []
    ready = end = encoding = 0.0
    for bucket in plan:
        num_bytes = _num_bytes(profile, bucket)
        encoding += num_bytes * codec.encode_s_per_byte
        # Buckets leave by index: one that is complete waits for those before it.
        ready = max(ready, _ready(profile, bucket) + encoding)
        start = max(ready, end)
        end = start + (cost if bucket.sharded is None else cost.halved()).seconds(num_bytes)
        buckets.append(SimulatedBucket(num_bytes, ready, start, end))
    decoded = profile.backward_s + encoding
    for reduced in buckets:
        decoded = max(decoded, reduced.end_s) + reduced.num_bytes * codec.decode_s_per_byte
    gathers: list[SimulatedBucket] = []
    gathered = 0.0
    for bucket in plan:
        if bucket.sharded is not None:
            num_bytes = _num_bytes(profile, bucket)
            start, gathered = gathered, gathered + (cost_of_weights or cost).halved().seconds(num_bytes)
            gathers.append(SimulatedBucket(num_bytes, 0.0, start, gathered))
    return Timeline(plan, buckets, profile.forward_s, profile.backward_s, profile.optimizer_s, gathers, decoded)


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


def _num_bytes(profile: Profile, bucket: BucketSpec) -> int:
    return 0 if bucket.sparse else sum(profile.specs[i].num_bytes for i in bucket.members)


def _ready(profile: Profile, bucket: BucketSpec) -> float:
    if bucket.sparse or not all(i in profile.arrived for i in bucket.members):
        return profile.backward_s
    return max((profile.ready_s[i] for i in bucket.members), default=profile.backward_s)
