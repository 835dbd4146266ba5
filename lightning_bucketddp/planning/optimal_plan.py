"""The optimal plan, whose last reduction ends earliest; how long a step takes with it, and with other dtypes. Pure.

Predictions compare plans and networks (Note: cost of an all-reduce, Note: timeline); they promise no step times.

Note: optimum
    f(j) is the earliest time at which the first j gradients are reduced: f(j) = min over i of max(f(i), ready(j)) +
    cost(i..j). Of plans that end equally early, the one with the fewest buckets is found backwards.

    Gradients that travel alone leave when they are ready, and take a time from the network that is the same in all
    plans. So the others are planned as if it did not exist: each is ready as much earlier as those before it take.

    Exact in that model (Note: timeline) for one kind of parameters, unless the last gradient travels alone. With
    several kinds, each stretch of gradients makes one bucket of every kind in it: near the optimum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lightning_bucketddp.config import AUTO, MIB, BucketCaps, ReducerConfig
from lightning_bucketddp.planning.cost import (
    NO_CODECS,
    AllReduceCost,
    Codecs,
    Network,
    Profile,
    Timeline,
    Wire,
    share_of_a_link,
    simulate,
)
from lightning_bucketddp.planning.plan import (
    BucketSpec,
    ParameterSpec,
    Sharding,
    complete_plan,
    has_choice,
    plan_buckets,
)

# Until a bucket is complete, its gradients also exist outside of it: this bounds the memory for them.
CEILING_BYTES = 128 * MIB
# Links at their nominal speed. A hop through TCP takes about 30 us, through RDMA 5 us, between GPUs of one host 2 us,
# or 10 us without peer-to-peer access: then data goes through the host's memory, at a third of PCIe 4.0 x16.
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

    Sparse parameters, and those that never arrived, are placed as `plan_buckets` does it.
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
    buckets = alone
    planned = [specs[i] for i in together]
    for start, stop in _stretches(planned, ready_s, cost, ceiling_bytes=ceiling_bytes, until_s=now_s):
        by_kind: dict[str, list[int]] = {}
        for i in together[start:stop]:
            by_kind.setdefault(specs[i].kind, []).append(i)
        buckets += by_kind.values()
    return complete_plan(
        specs,
        sorted(buckets, key=lambda bucket: bucket[-1]),
        arrived=profile.arrived,
        missing=profile.missing,
        caps=BucketCaps(by_position=(ceiling_bytes,), last=None),
    )


def _stretches(
    specs: Sequence[ParameterSpec], ready_s: Sequence[float], cost: AllReduceCost, *, ceiling_bytes: int, until_s: float
) -> list[tuple[int, int]]:
    """Return the stretches whose reductions end earliest, or by `until_s` if that is later; as few as possible.

    Stretch (i, j) holds the gradients i, ..., j - 1.
    """
    num_bytes = np.cumsum([0, *(spec.num_bytes for spec in specs)])
    ends_s = np.zeros(len(specs) + 1)  # f, by number of gradients
    # By number of gradients, too: where the last stretch can begin at the earliest, and the last gradient of each kind.
    earliest = [0]
    last_of_kinds: list[list[int]] = [[]]

    def seconds(i: Any, j: int) -> Any:
        num_kinds = sum(last > i for last in last_of_kinds[j])
        return num_kinds * cost.latency_s + (num_bytes[j] - num_bytes[i]) * cost.s_per_byte

    def all_ends_s(j: int) -> Any:
        """Return when the first j are reduced, by where their last stretch begins."""
        return np.maximum(ends_s[earliest[j] : j], ready_s[j - 1]) + seconds(np.arange(earliest[j], j), j)

    last_of_kind: dict[str, int] = {}
    for j, spec in enumerate(specs, start=1):
        last_of_kind[spec.kind] = j
        last_of_kinds.append(list(last_of_kind.values()))
        earliest.append(min(int(np.searchsorted(num_bytes, num_bytes[j] - ceiling_bytes)), j - 1))
        ends_s[j] = all_ends_s(j).min()

    found: list[tuple[int, int]] = []
    j, deadline_s = len(specs), max(float(ends_s[-1]), until_s)
    while j > 0:
        # The first begin with which the last stretch ends in time; sums in another order differ in their last digits.
        i = earliest[j] + int(np.argmax(all_ends_s(j) <= deadline_s + 1e-9 * deadline_s))
        found.append((i, j))
        deadline_s = max(deadline_s - float(seconds(i, j)), float(ends_s[i]))
        j = i
    return found[::-1]


# Of Adam and AdamW: the means of gradients and of their squares.
STATE_TENSORS = 2
# A rank's shard of a bucket begins at a multiple of this.
_ALIGN_BYTES = 64


def first_plan(profile: Profile, config: ReducerConfig, *, num_shards: int = 1) -> list[BucketSpec]:
    """Return the plan that is made of the first backward.

    With several `num_shards` each rank has a slice of each dense bucket, for an optimizer that works element by
    element. That plan stays: another one would move state between ranks.
    """

    def has_equal_slices(spec: ParameterSpec) -> bool:
        return spec.num_bytes // (spec.dtype or torch.float32).to_real().itemsize % num_shards == 0

    specs = [replace(spec, alone=spec.alone and has_equal_slices(spec)) for spec in profile.specs]
    plan = plan_buckets(specs, arrived=profile.arrived, missing=profile.missing, caps=config.caps)
    if num_shards == 1:
        return plan
    shards = Sharding(num_shards)
    return [bucket if bucket.sparse or not bucket.members else replace(bucket, sharded=shards) for bucket in plan]


def predict(
    profile: Profile, config: ReducerConfig, cost: AllReduceCost, *, codecs: Codecs = NO_CODECS, num_shards: int = 1
) -> Timeline:
    """Return the step of a reducer with this `config` and the backward in `profile`.

    Args:
        cost: of an all-reduce of gradients in their own dtype; `codecs` is needed for other dtypes.
        num_shards: among how many ranks optimizer state is divided.
    """
    wire = Wire.of(config.reduce_dtype, profile.specs, codecs)
    plan = first_plan(profile, config, num_shards=num_shards)
    plans = [plan]
    if num_shards == 1 and config.bucket_cap_mb == AUTO and has_choice(plan):
        # With several kinds of parameters it may be the worse one; the reducer keeps the better plan, too.
        plans.insert(0, optimal_plan(profile, cost=wire.cost(cost)))
    steps = (simulate(profile, p, wire.cost(cost), cost_of_weights=cost, codec=wire.codec) for p in plans)
    return min(steps, key=lambda step: step.end_s)


@dataclass(frozen=True, slots=True)
class StateByRank:
    """The bytes of optimizer state of a plan."""

    divided_bytes: Sequence[int]  # by rank, of the state that is divided
    whole_bytes: int  # on every rank: the state of parameters whose gradients are sparse

    @property
    def unsharded_bytes(self) -> int:
        return sum(self.divided_bytes) + self.whole_bytes

    @property
    def most_bytes(self) -> int:
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


_ABOUT = "see docs/slow-networks.md"


def best_dtype(seconds: Mapping[str, float]) -> str:
    """Return the dtype in which gradients should travel, by the seconds of a step with fp32 and with other dtypes.

    All advice uses this rule. It prefers precision: 16 bits must save 2% of a step, and 8 bits 5% more.
    """
    never = float("inf")
    precise = "bf16" if seconds.get("bf16", never) <= 0.98 * seconds["fp32"] else "fp32"
    return "int8" if seconds.get("int8", never) <= 0.95 * seconds[precise] else precise


@dataclass(frozen=True, slots=True)
class WireOption:
    """A step with one option of the strategy."""

    option: str  # as a user writes it
    sent_bytes: float  # by each rank, in a step
    compute_s: float
    exposed_s: float  # the part of the step that waits for the network
    local_steps: int = 1

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s

    def saves(self, other: WireOption) -> float:
        """Return the share of a step with `other` that this one saves; negative if it takes longer."""
        return 1 - self.step_s / other.step_s if other.step_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class WireOptions:
    """A step with each option, on one network."""

    by_dtype: Mapping[str, WireOption]  # "fp32" stands for the gradients' own dtype; "bf16" is there if it is smaller
    local: Sequence[WireOption]  # the fewest local steps first; empty with a sharded optimizer

    @classmethod
    def predict(
        cls,
        profile: Profile,
        config: ReducerConfig,
        cost: AllReduceCost,
        *,
        num_ranks: int,
        codecs: Codecs,
        is_sharded: bool = False,
    ) -> WireOptions:
        """Simulate a step with each option; `cost` is that of an all-reduce of gradients in their own dtype."""
        sent_bytes = share_of_a_link(num_ranks) * sum(spec.num_bytes for spec in profile.specs)
        by_dtype: dict[str, WireOption] = {}
        for name in ("fp32", "bf16", "int8"):
            reduce_dtype = None if name == "fp32" else name
            share = Wire.of(reduce_dtype, profile.specs).share
            if name == "bf16" and share >= 1:
                continue
            chosen = replace(config, reduce_dtype=reduce_dtype)
            step = predict(profile, chosen, cost, codecs=codecs, num_shards=num_ranks if is_sharded else 1)
            if is_sharded:
                share = (share + 1) / 2  # weights travel in their own dtype
            option = "gradients as they are" if reduce_dtype is None else f'reduce_dtype="{name}"'
            by_dtype[name] = WireOption(option, sent_bytes * share, step.compute_s, step.exposed_s)
        compute_s, exchange_s = by_dtype["fp32"].compute_s, local_exchange_s(profile, cost)
        local = [WireOption(f"local_steps={n}", sent_bytes / n, compute_s, exchange_s / n, n) for n in (10, 30, 100)]
        return cls(by_dtype, [] if is_sharded else local)

    @property
    def own(self) -> WireOption:
        return self.by_dtype["fp32"]

    @property
    def all(self) -> list[WireOption]:
        return [*self.by_dtype.values(), *self.local]

    @property
    def best(self) -> WireOption:
        """Return the option to choose: the one that changes the numbers least, if it is enough.

        Local steps, which train differently, are for where a step with int8 still waits longer than it computes; then
        the fewest that end this.
        """
        best = self._best_of(*self.by_dtype)
        if best.exposed_s <= best.compute_s or not self.local:
            return best
        return next((option for option in self.local if option.exposed_s <= option.compute_s), self.local[-1])

    def _best_of(self, *dtypes: str) -> WireOption:
        return self.by_dtype[best_dtype({name: self.by_dtype[name].step_s for name in dtypes if name in self.by_dtype})]

    def advice(self, network: str) -> str:
        """Explain in a sentence which option to choose on this network, and why."""
        best, int8 = self.best, self.by_dtype["int8"]
        saved = f"`{best.option}` saves {best.saves(self.own):.0%} of a step on {network}"
        if best.local_steps > 1:
            return (
                f"{saved}, but trains differently, {_ABOUT}. `{int8.option}` saves {int8.saves(self.own):.0%}, and a"
                f" step still waits {in_ms(int8.exposed_s)} for {in_ms(int8.compute_s)} of computation."
            )
        if best is int8:
            precise = self._best_of("fp32", "bf16")
            over = "" if precise is self.own else f", and {int8.saves(precise):.0%} of one with bf16"
            return f"{saved}{over}; gradients then have 8 bits, {_ABOUT}."
        more = int8.saves(best)
        instead = (
            f"`{int8.option}` would save {more:.0%} more, which is not worth its 8 bits."
            if more > 0
            else f"`{int8.option}` would take {-more:.0%} longer: do not set it."
        )
        if best is self.own:
            return f"Leave gradients as they are on {network}: a step waits {in_ms(best.exposed_s)}. {instead}"
        return f"{saved}. {instead}"


def local_exchange_s(profile: Profile, cost: AllReduceCost) -> float:
    """Return how long the average of all weights takes, with each rank an island of its own; nothing hides it."""
    return cost.seconds(sum(spec.num_bytes for spec in profile.specs))


def in_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
