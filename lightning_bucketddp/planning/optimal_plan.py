"""The optimal plan, whose last reduction ends earliest, and how long a step would take with it. Pure.

Predictions are made with the planner's model (Note: cost of an all-reduce, Note: timeline): no contention, no
stragglers, a link of its own for each rank. It compares plans and networks; it promises no step times.

Note: optimum
    f(j) is the earliest time at which the first j gradients are reduced: f(j) = min over i of max(f(i), ready(j)) +
    cost(i..j). f does not decrease with j, so among the i with f(i) <= ready(j) the largest is best. Nor does f(i)
    minus the time that the first i gradients take on the network, so among the other i the smallest is best. Both hold
    with a ceiling on the size of buckets, too. Of plans that end equally early, the one with the fewest buckets is
    found backwards (docs/design/optimal-plan.md).

    Gradients that travel alone leave when they are ready, and take a time from the network that is the same in all
    plans. So the others are planned as if it did not exist: each is ready as much earlier as those before it take.

    Exact in that model (Note: timeline) for one kind of parameters, unless the last gradient travels alone. With
    several kinds, each stretch of gradients makes one bucket of every kind in it, and all buckets of a stretch count as
    ready when the last of them is: near the optimum.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from lightning_bucketddp.config import AUTO, MIB, BucketCaps, ReducerConfig
from lightning_bucketddp.planning.cost import NO_CODECS, AllReduceCost, Codecs, Network, Profile, Wire
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec, complete_plan, has_choice, plan_buckets
from lightning_bucketddp.planning.shares import Shares
from lightning_bucketddp.planning.simulation import Timeline, simulate

# Until a bucket is complete, its gradients exist outside of it, too: this bounds the memory for them. Networks reach
# their full speed with much less.
CEILING_BYTES = 128 * MIB
# Links at their nominal speed. A hop through TCP takes some 30 us, through RDMA 5 us, between GPUs of one host 2 us, or
# 10 us where they have no peer-to-peer access: there all goes through the host's memory, at a third of PCIe 4.0 x16.
NETWORKS = {
    "eth-100m": Network("100 Mbit", 12.5e6, 30e-6),
    "eth-1g": Network("1 Gbit", 125e6, 30e-6),
    "eth-10g": Network("10 Gbit", 1.25e9, 30e-6),
    "eth-25g": Network("25 Gbit", 3.125e9, 30e-6),
    "pcie": Network("PCIe", 10e9, 10e-6),
    "eth-100g": Network("100 Gbit", 12.5e9, 5e-6),
    "ib-400g": Network("400 Gbit", 50e9, 5e-6),
    "nvlink": Network("NVLink", 400e9, 2e-6),
}


def optimal_plan(
    profile: Profile, *, cost: AllReduceCost | None = None, ceiling_bytes: int = CEILING_BYTES
) -> list[BucketSpec]:
    """Return the buckets for the parameters of `profile`, by position in it (Note: optimum).

    Sparse parameters, and those that never arrived, are placed as `plan_buckets` does it. A parameter larger than
    `ceiling_bytes` has a bucket of its own. Without a `cost`, the profile must have one.
    """
    specs, cost = profile.specs, cost or profile.cost
    assert cost is not None
    together: list[int] = []
    ready_s: list[float] = []
    alone: list[list[int]] = []
    now_s = alone_s = 0.0
    for i in profile.arrived:
        if not specs[i].sparse:
            now_s = max(now_s, profile.ready_s[i] - alone_s)
            if specs[i].alone:
                alone.append([i])
                alone_s += cost.seconds(specs[i].num_bytes)
            else:
                together.append(i)
                ready_s.append(now_s)
    search = _Search([specs[i] for i in together], ready_s, cost, ceiling_bytes=ceiling_bytes)
    stretches = search.stretches(until_s=now_s)
    buckets = [bucket for start, stop in stretches for bucket in _by_kind(specs, together[start:stop])]
    return complete_plan(
        specs,
        sorted(buckets + alone, key=lambda bucket: bucket[-1]),
        arrived=profile.arrived,
        missing=profile.missing,
        caps=BucketCaps(by_position=(ceiling_bytes,), last=None),
    )


def _by_kind(specs: Sequence[ParameterSpec], members: Sequence[int]) -> list[list[int]]:
    """Return one bucket of each kind."""
    kinds = dict.fromkeys(specs[i].kind for i in members)
    return [[i for i in members if specs[i].kind == kind] for kind in kinds]


class _Search:
    """The search for the best stretches. Stretch (i, j) holds the gradients i, ..., j - 1."""

    def __init__(
        self, specs: Sequence[ParameterSpec], ready_s: Sequence[float], cost: AllReduceCost, *, ceiling_bytes: int
    ) -> None:
        self._ready_s = ready_s
        self._cost = cost
        # By number of gradients: their bytes, f, where its last stretch begins and could begin at the earliest, and
        # behind which gradient each kind was seen last.
        self._bytes = list(accumulate((spec.num_bytes for spec in specs), initial=0))
        self._end_s = [0.0]
        self._begin = [0]
        self._earliest_begin = [0]
        self._last_of_kinds: list[tuple[int, ...]] = [()]
        self._find_ends([spec.kind for spec in specs], ceiling_bytes)

    def stretches(self, *, until_s: float) -> list[tuple[int, int]]:
        """Return the stretches whose reductions end earliest, or at `until_s` if that is later; as few as possible."""
        found: list[tuple[int, int]] = []
        j, deadline_s = len(self._ready_s), max(self._end_s[-1], until_s)
        while j > 0:
            i = self._first_begin(j, deadline_s)
            found.append((i, j))
            deadline_s = max(deadline_s - self._seconds(i, j), self._end_s[i])
            j = i
        return found[::-1]

    def _find_ends(self, kinds: Sequence[str], ceiling_bytes: int) -> None:
        last_of_kind: dict[str, int] = {}
        last_done = earliest = 0
        for j, (kind, ready_s) in enumerate(zip(kinds, self._ready_s, strict=True), start=1):
            last_of_kind[kind] = j
            self._last_of_kinds.append(tuple(last_of_kind.values()))
            while earliest < j - 1 and self._bytes[j] - self._bytes[earliest] > ceiling_bytes:
                earliest += 1
            while last_done < j - 1 and self._end_s[last_done + 1] <= ready_s:
                last_done += 1
            # Where the stretch gets one kind less, the argument begins anew.
            begins = {last_done, last_done + 1, earliest}.union(last_of_kind.values())
            end_s, begin = min((self._end_of(i, j), i) for i in begins if earliest <= i < j)
            self._end_s.append(end_s)
            self._begin.append(begin)
            self._earliest_begin.append(earliest)

    def _first_begin(self, j: int, deadline_s: float) -> int:
        """Return the earliest begin of the last stretch of the first j gradients with which it ends by `deadline_s`."""
        deadline_s += 1e-9 * deadline_s  # sums in another order differ in their last digits
        ready_s = self._ready_s[j - 1]
        candidates = range(self._earliest_begin[j], self._begin[j])
        first = candidates.start + bisect_left(
            candidates, True, key=lambda i: ready_s + self._seconds(i, j) <= deadline_s
        )
        return first if self._end_of(first, j) <= deadline_s else self._begin[j]

    def _end_of(self, i: int, j: int) -> float:
        return max(self._end_s[i], self._ready_s[j - 1]) + self._seconds(i, j)

    def _seconds(self, i: int, j: int) -> float:
        num_kinds = sum(last > i for last in self._last_of_kinds[j])
        return num_kinds * self._cost.latency_s + (self._bytes[j] - self._bytes[i]) * self._cost.s_per_byte


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan, by position in the profile, and the step that it makes."""

    plan: Sequence[BucketSpec]
    timeline: Timeline


def predict_sharded(
    profile: Profile, config: ReducerConfig, cost: AllReduceCost, *, num_ranks: int, codecs: Codecs = NO_CODECS
) -> Prediction:
    """Return what `predict` does, for optimizers whose state is divided among `num_ranks`."""
    plan = sharded_plan(profile, config, num_ranks=num_ranks)
    wire = Wire.of(config.reduce_dtype, profile.specs, codecs)
    return Prediction(plan, simulate(profile, plan, wire.cost(cost), cost_of_weights=cost, codec=wire.codec))


def predict(profile: Profile, config: ReducerConfig, cost: AllReduceCost, *, codecs: Codecs = NO_CODECS) -> Prediction:
    """Return the step of a reducer with this `config` and the backward in `profile`, if an all-reduce costs `cost`.

    `cost` is that of gradients which travel as what they are; `codecs` is needed for others.
    """
    wire = Wire.of(config.reduce_dtype, profile.specs, codecs)
    cost = wire.cost(cost)
    plan = plan_buckets(profile.specs, arrived=profile.arrived, missing=profile.missing, caps=config.caps)
    plans = [plan]
    if config.bucket_cap_mb == AUTO and has_choice(plan):
        # With several kinds of parameters it may be the worse one; the reducer keeps the better plan, too.
        plans.insert(0, optimal_plan(profile, cost=cost))
    predictions = (Prediction(p, simulate(profile, p, cost, codec=wire.codec)) for p in plans)
    return min(predictions, key=lambda p: p.timeline.end_s)


# Of Adam and AdamW: the means of gradients and of their squares.
STATE_TENSORS = 2
# Where a rank's share of a bucket may begin.
_ALIGN_BYTES = 64


def sharded_plan(profile: Profile, config: ReducerConfig, *, num_ranks: int) -> list[BucketSpec]:
    """Return the plan of an optimizer that works element by element: each rank has a slice of each dense bucket.

    It is the one that is made of the first backward: another one would move state between ranks.
    """
    specs = [replace(spec, alone=spec.alone and _has_equal_slices(spec, num_ranks)) for spec in profile.specs]
    plan = plan_buckets(specs, arrived=profile.arrived, missing=profile.missing, caps=config.caps)
    shares = Shares(num_ranks)
    return [bucket if bucket.sparse or not bucket.members else replace(bucket, sharded=shares) for bucket in plan]


def _has_equal_slices(spec: ParameterSpec, num_ranks: int) -> bool:
    dtype: torch.dtype = getattr(torch, spec.kind.split()[0].removeprefix("torch."))
    return spec.num_bytes // dtype.to_real().itemsize % num_ranks == 0


@dataclass(frozen=True, slots=True)
class StateByRank:
    """The optimizer state of a plan.

    Attributes:
        divided_bytes: by rank, what it has of the state that is divided.
        whole_bytes: what every rank has: that of parameters whose gradients are sparse.
    """

    divided_bytes: Sequence[int]
    whole_bytes: int

    @property
    def unsharded_bytes(self) -> int:
        """Return what every rank would have without sharding."""
        return sum(self.divided_bytes) + self.whole_bytes

    @property
    def most_bytes(self) -> int:
        """Return what the rank has that has most."""
        return max(self.divided_bytes) + self.whole_bytes


def state_by_rank(
    specs: Sequence[ParameterSpec],
    plan: Sequence[BucketSpec],
    *,
    num_ranks: int,
    tensors_per_parameter: int = STATE_TENSORS,
) -> StateByRank:
    """Return how the state of an optimizer of all parameters in `plan` is divided."""
    divided = [0] * num_ranks
    whole = 0
    for bucket in plan:
        num_bytes = tensors_per_parameter * sum(specs[i].num_bytes for i in bucket.members)
        if bucket.sharded is None:
            whole += num_bytes
            continue
        padded = bucket.sharded.padded(num_bytes, align=tensors_per_parameter * _ALIGN_BYTES)
        for rank, (start, stop) in enumerate(bucket.sharded.ranges(0, num_bytes, of=padded)):
            divided[rank] += stop - start
    return StateByRank(divided, whole)
