"""What a step would take on networks and numbers of ranks that are not at hand. Pure.

The model is that of the planner (Note: cost of an all-reduce, Note: timeline): no contention, no stragglers, a link of
its own for each rank. It compares plans and networks; it promises no step times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_bucketddp.config import AUTO, REDUCE_DTYPES, ReducerConfig
from lightning_bucketddp.planning.cost import AllReduceCost, Network
from lightning_bucketddp.planning.optimum import optimal_plan
from lightning_bucketddp.planning.plan import BucketPlan, has_choice, plan_buckets
from lightning_bucketddp.planning.profile import Profile
from lightning_bucketddp.planning.timeline import Timeline, simulate

# Links at their nominal speed. A hop through TCP takes some 30 us, through RDMA 5 us, between GPUs of one host 2 us.
NETWORKS = {
    "eth-1g": Network("1 Gbit", 125e6, 30e-6),
    "eth-10g": Network("10 Gbit", 1.25e9, 30e-6),
    "eth-100g": Network("100 Gbit", 12.5e9, 5e-6),
    "ib-400g": Network("400 Gbit", 50e9, 5e-6),
    "nvlink": Network("NVLink", 400e9, 2e-6),
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan, by position in the profile, and the step that it makes."""

    plan: Sequence[BucketPlan]
    timeline: Timeline


def predict(profile: Profile, config: ReducerConfig, cost: AllReduceCost) -> Prediction:
    """What a reducer with this `config` would make of the backward in `profile`, if an all-reduce costs `cost`."""
    cost = _of_wire(profile, config, cost)
    plan = plan_buckets(profile.specs, arrived=profile.arrived, missing=profile.missing, caps=config.caps)
    predicted = Prediction(plan, simulate(profile, plan, cost))
    if config.bucket_cap_mb == AUTO and has_choice(plan):
        best = optimal_plan(profile, cost=cost)
        timeline = simulate(profile, best, cost)
        # Not with several kinds of parameters; the reducer keeps the better plan, too.
        if timeline.end_s <= predicted.timeline.end_s:
            return Prediction(best, timeline)
    return predicted


def _of_wire(profile: Profile, config: ReducerConfig, cost: AllReduceCost) -> AllReduceCost:
    """The cost of a byte of gradients, if they travel as something else."""
    if config.reduce_dtype is None:
        return cost
    itemsize = REDUCE_DTYPES[config.reduce_dtype].itemsize
    own_bytes = sum(spec.num_bytes for spec in profile.specs)
    wire_bytes = sum(spec.num_bytes // _itemsize(spec.kind) * itemsize for spec in profile.specs)
    return AllReduceCost(cost.latency_s, cost.s_per_byte * wire_bytes / own_bytes)


def _itemsize(kind: str) -> int:
    dtype: torch.dtype = getattr(torch, kind.split()[0].removeprefix("torch."))
    return dtype.itemsize
