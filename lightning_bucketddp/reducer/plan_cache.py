"""The plans of a module's parameters: one `BucketSet` for each set of trainable parameters, and how plans are tuned.

Note: tuning
    With `bucket_cap_mb="auto"` all ranks count backwards alike and get rank 0's decisions by broadcast, so they change
    plans at the same backward. Rank 0 computes the plan (Note: optimum), and keeps it only if it measured better
    (docs/design/optimal-plan.md). Then the tuner is dropped.
"""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import AUTO, MIB, ReducerConfig
from lightning_bucketddp.planning.cost import AllReduceCost, Profile, cost_until, simulate
from lightning_bucketddp.planning.optimal_plan import optimal_plan
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec, has_choice, plan_buckets
from lightning_bucketddp.reducer.bucket import BufferedBucket, LateGradientError
from lightning_bucketddp.reducer.bucket_set import BucketMaker, BucketSet
from lightning_bucketddp.reducer.grad_hooks import hook_on_node
from lightning_bucketddp.reducer.observer import Clock, ReducerStats, clock_of, is_being_captured
from lightning_bucketddp.reducer.quantization import QuantizedMeanReduction
from lightning_bucketddp.reducer.reduction import MeanReduction, Reduction
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.wording import pluralize

log = logging.getLogger(__name__)

# Sizes of gradients that are measured.
_SMALLEST_BYTES = 4096
_GROWTH = 8
_LARGEST_BYTES = 16 * MIB
# A size that takes longer is the last: the next one would take eight times as long.
_SLOW_S = 0.01
_NUM_REPETITIONS = 5


def measure_cost(reduction: Reduction, clock: Clock, *, dtype: torch.dtype, module_bytes: int) -> AllReduceCost:
    """Return what `reduction` costs, casts included, for gradients of `dtype` in sizes of such a module. Collective."""
    collectives = reduction.collectives
    seconds: dict[int, list[float]] = {}
    num_bytes, goes_on = _SMALLEST_BYTES, True
    while goes_on:
        members = [torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device="meta")]
        bucket = BufferedBucket(members, num_flags=0, device=collectives.device)
        start = partial(reduction.start, bucket, index=0, is_last=False)
        seconds[num_bytes] = clock.times(lambda start=start: start().wait(), number=_NUM_REPETITIONS)  # type: ignore[misc]
        is_slow = statistics.median(seconds[num_bytes]) > _SLOW_S
        num_bytes *= _GROWTH
        is_enough = num_bytes > min(module_bytes, _LARGEST_BYTES) and len(seconds) > 1
        goes_on = collectives.broadcast_json(not (is_slow or is_enough))
    return AllReduceCost.fit(seconds)


def measure_wires(
    collectives: Collectives, *, module_bytes: int, progress: Callable[[str], None] = lambda _: None
) -> dict[str, AllReduceCost]:
    """Return what a reduction of fp32 gradients costs, by what they travel as. Collective."""
    reductions: dict[str, Reduction] = {
        "fp32": MeanReduction(collectives),
        "bf16": MeanReduction(collectives, dtype=torch.bfloat16),
        "int8": QuantizedMeanReduction(collectives),
    }
    costs: dict[str, AllReduceCost] = {}
    clock = clock_of(collectives.device)
    for name, reduction in reductions.items():
        progress(f"gradients as {name} ...")
        costs[name] = measure_cost(reduction, clock, dtype=torch.float32, module_bytes=module_bytes)
        reduction.close()
    return costs


# With both plans, and the first backward, which has none, this makes 17 backwards.
NUM_WARM_UP = 3
NUM_OBSERVED = 5

# Less than this fraction of a backward is not worth changing plans for, nor could it be measured.
_WORTHWHILE = 0.01


@dataclass(slots=True)
class _Observation:
    """One backward, by marks of a clock."""

    start: Any
    arrivals: dict[int, Any] = field(default_factory=dict)
    backward_end: Any = None
    reduced: Any = None


@dataclass(kw_only=True, eq=False)
class PlanTuner:
    """Finds the best plan for one set of trainable parameters (Note: tuning)."""

    plans: PlanCache
    first_plan: Sequence[BucketSpec]
    is_settled: bool = False
    profile: Profile | None = None
    decision: str = "no backward could be observed, the plan stays as it is"
    _hooks: list[tuple[Node, RemovableHandle]] = field(default_factory=list)
    _num_backwards: int = 0
    _current: _Observation | None = None
    _observed: list[_Observation] = field(default_factory=list)
    _first_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._members = [i for bucket in self.first_plan for i in bucket.members]
        self._clock, self._collectives = self.plans.clock, self.plans.collectives

    def backward_began(self) -> None:
        if is_being_captured(self._collectives.device):
            self.close()
        elif self._hooks:
            self._current = _Observation(self._clock.mark())

    def backward_ended(self) -> None:
        if self._current is not None:
            self._current.backward_end = self._clock.mark()

    def gradients_final(self) -> None:
        if self._current is not None:
            self._current.reduced = self._clock.mark()
            self._observed.append(self._current)

    def end(self) -> Sequence[BucketSpec] | None:
        """Count a backward that has ended; return the plan for the next one if it changes."""
        self._current = None
        if self.is_settled:
            return None
        self._num_backwards += 1
        phase, position = divmod(self._num_backwards, NUM_WARM_UP + NUM_OBSERVED)
        if position == NUM_WARM_UP:
            self._observed.clear()
            if not self._hooks:
                params = self.plans.params
                self._hooks = [hook_on_node(params[i], partial(self._mark_arrival, i)) for i in self._members]
        if position > 0:
            return None
        return self._propose() if phase == 1 else self._decide()

    def close(self) -> None:
        """Stop measuring; the plan stays as it is."""
        self.is_settled = True
        self._current = None
        self._observed.clear()
        for _, handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def _mark_arrival(self, param_index: int, *_: object) -> None:
        if self._current is not None:
            self._current.arrivals[param_index] = self._clock.mark()

    def _propose(self) -> Sequence[BucketSpec] | None:
        dense = [i for i in self._members if not self.plans.specs[i].sparse]
        largest = max(dense, key=lambda i: self.plans.specs[i].num_bytes)
        cost = self.plans.cost_of(
            self.plans.params[largest].dtype, module_bytes=sum(self.plans.specs[i].num_bytes for i in dense)
        )
        proposal = self._compute(cost) if self._collectives.rank == 0 and self._observed else None
        message = None if proposal is None else [asdict(bucket) for bucket in proposal]
        agreed: list[dict[str, Any]] | None = self._collectives.broadcast_json(message)
        if agreed is None:
            self._settle()
            return None
        return [BucketSpec(tuple(bucket.pop("members")), **bucket) for bucket in agreed]

    def _compute(self, cost: AllReduceCost) -> Sequence[BucketSpec] | None:
        """Return the best plan, if it promises to be better than the first. Rank 0 only."""
        self._first_s = self._total_s()
        order, profile = self._profile(cost)
        position = {index: n for n, index in enumerate(order)}
        first = [replace(b, members=tuple(position[i] for i in b.members)) for b in self.first_plan]
        # Reductions are slower beside a backward than alone (docs/design/optimal-plan.md).
        cost = cost_until(profile, first, end_s=statistics.median(self._first_s))
        plan = optimal_plan(profile, cost=cost)
        first_s, best_s = (simulate(profile, p, cost).end_s for p in (first, plan))
        # With the costs that the plan is computed for: later simulations then predict the same.
        self.profile = replace(profile, cost=cost)
        if first_s - best_s < _WORTHWHILE * profile.backward_s:
            self.decision = f"{len(first)} buckets of up to 25 MiB stay, no other plan promises to be faster"
            return None
        instead = "of other sizes" if len(plan) == len(first) else f"instead of {len(first)}"
        self.decision = (
            f"{len(plan)} bucket{'' if len(plan) == 1 else 's'} {instead}: backward with reductions predicted to take"
            f" {best_s * 1e3:.2f} instead of {first_s * 1e3:.2f} ms"
        )
        return [replace(bucket, members=tuple(order[i] for i in bucket.members)) for bucket in plan]

    def _profile(self, cost: AllReduceCost) -> tuple[list[int], Profile]:
        """Return the parameters in order of arrival, and what was measured of them.

        A gradient that was missing once counts as missing, because a bucket waits for all its members.
        """
        seconds = self._clock.seconds
        ready_s = {
            i: statistics.median(seconds(seen.start, seen.arrivals[i]) for seen in self._observed)
            for i in self._members
            if all(i in seen.arrivals for seen in self._observed)
        }
        arrived = sorted(ready_s, key=lambda i: ready_s[i])
        order = arrived + [i for i in self._members if i not in ready_s]
        backward_s = statistics.median(seconds(seen.start, seen.backward_end) for seen in self._observed)
        return order, Profile(
            [self.plans.specs[i] for i in order],
            [ready_s[i] for i in arrived],
            backward_s=max(backward_s, *ready_s.values(), 0.0),
            cost=cost,
            num_ranks=self._collectives.world_size,
            reduce_dtype=self.plans.config.reduce_dtype,
        )

    def _decide(self) -> Sequence[BucketSpec] | None:
        is_better = False
        if self._collectives.rank == 0 and self._observed:
            now_s = self._total_s()
            first, now = statistics.median(self._first_s), statistics.median(now_s)
            noise = max(statistics.median(abs(s - first) for s in self._first_s), _WORTHWHILE * first)
            is_better = now < first - noise
            within = ", which is within the noise" if first - noise <= now < first else ""
            outcome = "they stay" if is_better else f"back to {len(self.first_plan)}"
            self.decision += f", measured {now * 1e3:.2f} instead of {first * 1e3:.2f} ms{within}; {outcome}"
        is_better = self._collectives.broadcast_json(is_better)
        self._settle()
        return None if is_better else self.first_plan

    def _total_s(self) -> list[float]:
        return [self._clock.seconds(seen.start, seen.reduced) for seen in self._observed]

    def _settle(self) -> None:
        self.close()
        if self._collectives.rank == 0:
            self.plans.report(f"bucketddp: {self.decision}.")


# A plan not used for so many backwards belongs to a phase of training that is over. Alternating optimizers use theirs
# much sooner.
_FORGET_PLAN_AFTER = 64

# Gradients of this size are reduced where they are: on a host copying one costs nearly as much as reducing it, on an
# accelerator little but memory.
_ALONE_FROM_BYTES = {"cpu": 4 * MIB, "accelerator": 32 * MIB}

Trainable = tuple[bool, ...]


@dataclass(eq=False)
class PlanCache:
    """Makes and caches plans, and changes to better ones (Note: tuning). Fields are arguments of `Reducer`."""

    replicas: Replicas
    config: ReducerConfig
    reduction: Reduction
    stats: ReducerStats
    clock: Clock
    report: Callable[[str], None]
    maker: BucketMaker | None
    description: str = "no plan yet"
    # What was measured last for `bucket_cap_mb="auto"`, and the decision in words; on rank 0 only.
    profile: Profile | None = None
    tuning: str = ""
    _cost: AllReduceCost | None = None
    _bucket_sets: dict[Trainable, BucketSet] = field(default_factory=dict)
    _better: dict[Trainable, Sequence[BucketSpec]] = field(default_factory=dict)
    _tuners: dict[Trainable, PlanTuner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parameters, sparse = self.replicas.parameters, self.replicas.sparse_names
        may_be_alone = self.config.comm_hook is None
        self.specs = [
            spec_of(name, param, device=param.device, sparse=name in sparse, may_be_alone=may_be_alone)
            for name, param in parameters.items()
        ]
        self.params = list(parameters.values())
        self.collectives = self.replicas.collectives

    def cost_of(self, dtype: torch.dtype, *, module_bytes: int) -> AllReduceCost:
        """Return what reductions cost, which is measured once. Collective."""
        if self._cost is None:
            self._cost = measure_cost(self.reduction, self.clock, dtype=dtype, module_bytes=module_bytes)
        return self._cost

    def describe_outlook(self) -> str:
        """Describe the first plan, as it will be if gradients arrive in the usual order."""
        members = [index for index in reversed(range(len(self.params))) if self.params[index].requires_grad]
        gradients = f"{sum(self.specs[index].num_bytes for index in members) / MIB:.2f} MiB of gradients"
        if self.maker is not None:  # it depends on optimizers, which are not known yet
            return gradients
        plan = plan_buckets(self.specs, arrived=members, missing=[], caps=self.config.caps)
        return f"{pluralize(len(plan), 'bucket')} planned for {gradients},"

    def late_gradient(self, param_index: int, bucket_index: int) -> LateGradientError:
        return LateGradientError(
            f"Gradient of `{self.specs[param_index].name}` arrived after its bucket {bucket_index} had left (rank"
            f" {self.collectives.global_rank}). The parameter is used more often in this backward than in the first"
            " one. Pass `overlap=False` to the strategy if that is intended."
        )

    def close(self) -> None:
        """Drop the buffers, and stop all tuners."""
        for tuner in self._tuners.values():
            tuner.close()
        self._tuners.clear()
        self._bucket_sets.clear()
        self._better.clear()

    def tuner(self, trainable: Trainable) -> PlanTuner | None:
        """Return the tuner of this set, as long as its plan may still change."""
        # Hashing a set of thousands of parameters takes time in every step, which an empty dictionary saves.
        return self._tuners.get(trainable) if self._tuners else None

    def is_settled(self, trainable: Trainable) -> bool:
        """Return whether this set has a plan, and keeps it."""
        return trainable in self._bucket_sets and trainable not in self._tuners and trainable not in self._better

    def will_change(self, trainable: Trainable) -> bool:
        """Return whether the next `bucket_set` makes new buffers: then drop the old ones first."""
        return bool(self._better) and trainable in self._better

    def bucket_set(self, trainable: Trainable) -> BucketSet | None:
        """Return the buckets for a backward that begins; None: no plan is known for this set."""
        if self.will_change(trainable):
            # Gradients that are still in the old buffers are copied like any others.
            old = self._bucket_sets.pop(trainable)
            num_firings, streams = old.num_firings, old.streams
            del old  # before there are new buffers
            # The first plan, if it was better after all, has no tuner any more.
            origin = ", computed" if trainable in self._tuners else ""
            self._place(trainable, self._better.pop(trainable), num_firings, streams, origin=origin)
        bucket_set = self._bucket_sets.get(trainable)
        if bucket_set is not None:
            bucket_set.last_used = self.stats.num_backwards
        return bucket_set

    def make(self, trainable: Trainable, order: Sequence[int], streams: set[torch.cuda.Stream]) -> BucketSet:
        """Plan from the `order` in which hooks fired in a backward, repetitions included, and on which `streams`."""
        self.replicas.agree()
        in_order_of_last_arrival = list(dict.fromkeys(reversed(order)))[::-1]
        arrived: list[int] = self.collectives.broadcast_json(in_order_of_last_arrival)
        seen = set(arrived)
        # What is registered last usually gets its gradient first.
        missing = [i for i in reversed(range(len(self.params))) if trainable[i] and i not in seen]
        if self.maker is None:
            plan = plan_buckets(self.specs, arrived=arrived, missing=missing, caps=self.config.caps)
        else:
            plan = self.maker.plan(self.specs, self.params, arrived=arrived, missing=missing, config=self.config)
        oldest = self.stats.num_backwards - _FORGET_PLAN_AFTER
        for unused in [key for key, known in self._bucket_sets.items() if known.last_used < oldest]:
            del self._bucket_sets[unused]
            self._better.pop(unused, None)
            if unused in self._tuners:
                self._tuners.pop(unused).close()
        # Another plan would move optimizer state between ranks; a communication hook keeps state by bucket; and runs
        # that are to be deterministic must not depend on time.
        config = self.config
        is_auto = config.bucket_cap_mb == AUTO and config.overlap and not torch.are_deterministic_algorithms_enabled()
        is_free = self.maker is None and config.comm_hook is None and self.collectives.world_size > 1
        if is_auto and is_free and has_choice(plan):
            self._tuners[trainable] = PlanTuner(plans=self, first_plan=plan)
        return self._place(trainable, plan, Counter(order), streams)

    def end_backward(self, trainable: Trainable, tuner: PlanTuner) -> None:
        """Count a backward that `tuner` has measured, and that has ended on all ranks."""
        better = tuner.end()
        if better is not None:
            self._better[trainable] = better
        if tuner.is_settled:
            if tuner.profile is not None:
                self.profile, self.tuning = tuner.profile, tuner.decision
            del self._tuners[trainable]

    def _place(
        self,
        trainable: Trainable,
        plan: Sequence[BucketSpec],
        num_firings: Mapping[int, int],
        streams: set[torch.cuda.Stream],
        *,
        origin: str = "",
    ) -> BucketSet:
        bucket_set = self._bucket_sets[trainable] = BucketSet(
            plan=plan,
            params=self.params,
            num_firings=num_firings,
            streams=streams,
            trainable=trainable,
            collectives=self.collectives,
            config=self.config,
            maker=self.maker,
            version=self.stats.num_plans + 1,
            last_used=self.stats.num_backwards,
        )
        self.stats.num_plans += 1
        self.description = f"{bucket_set}{origin}"
        if self.collectives.rank == 0:
            log.info("bucketddp: plan %d: %s", self.stats.num_plans, self.description)
        return bucket_set


def spec_of(name: str, param: Tensor, *, device: torch.device, sparse: bool, may_be_alone: bool) -> ParameterSpec:
    kind = f"{param.dtype} {device}"
    is_large = param.nbytes >= _ALONE_FROM_BYTES["cpu" if device.type == "cpu" else "accelerator"]
    return ParameterSpec(
        name, num_bytes=param.nbytes, kind=kind, sparse=sparse, alone=may_be_alone and is_large and not sparse
    )
