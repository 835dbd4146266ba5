"""`bucket_cap_mb="auto"`: a plan from what was measured, kept if it is better than the one before.

Note: tuning
    All ranks count backwards alike and learn rank 0's decisions by broadcast, so they change plans at the same
    backward. Rank 0 computes the plan (Note: optimum), and keeps it only if it measured better
    (docs/design/optimal-plan.md). After that nothing is left of the tuner.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import MIB
from lightning_bucketddp.planning.cost import AllReduceCost, Profile
from lightning_bucketddp.planning.optimal_plan import optimal_plan
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec
from lightning_bucketddp.planning.simulation import cost_until, simulate
from lightning_bucketddp.reducer.bucket import Arrivals, BufferedBucket
from lightning_bucketddp.reducer.grad_hooks import hook_on_node
from lightning_bucketddp.reducer.observer import BackwardObserver, Clock, clock_of, is_being_captured
from lightning_bucketddp.reducer.quantization import QuantizedMeanReduction
from lightning_bucketddp.reducer.reduction import MeanReduction, Reduction

_SMALLEST_BYTES = 4096
_GROWTH = 8
# More would say nothing new about the bandwidth, and takes memory.
_LARGEST_BYTES = 16 * MIB
# A size that takes longer is the last: the next one would take eight times as long.
_SLOW_S = 0.01
_NUM_REPETITIONS = 5


@dataclass(eq=False)
class CostMeter:
    """Measures once what `reduction` costs, casts included. All ranks measure together."""

    reduction: Reduction
    collectives: Collectives
    clock: Clock
    _cost: AllReduceCost | None = None

    def measure(self, *, dtype: torch.dtype, module_bytes: int) -> AllReduceCost:
        """Return what gradients of `dtype` cost, measured with sizes that such a module has."""
        if self._cost is None:
            seconds: dict[int, list[float]] = {}
            num_bytes, goes_on = _SMALLEST_BYTES, True
            while goes_on:
                seconds[num_bytes] = self._times(num_bytes, dtype)
                is_slow = statistics.median(seconds[num_bytes]) > _SLOW_S
                num_bytes *= _GROWTH
                is_enough = num_bytes > min(module_bytes, _LARGEST_BYTES) and len(seconds) > 1
                goes_on = self.collectives.broadcast_json(not (is_slow or is_enough))
            self._cost = AllReduceCost.fit(seconds)
        return self._cost

    def _times(self, num_bytes: int, dtype: torch.dtype) -> list[float]:
        members = [torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device="meta")]
        bucket = BufferedBucket(members, arrivals=Arrivals(0), num_flags=0, device=self.collectives.device)
        marks = []
        for _ in range(1 + _NUM_REPETITIONS):
            start = self.clock.mark()
            self.reduction.start(bucket, index=0, is_last=False).wait()
            marks.append((start, self.clock.mark()))
        # The first one waits until all ranks are here.
        return [self.clock.seconds(start, stop) for start, stop in marks[1:]]


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
    for name, reduction in reductions.items():
        progress(f"gradients as {name} ...")
        meter = CostMeter(reduction, collectives=collectives, clock=clock_of(collectives.device))
        costs[name] = meter.measure(dtype=torch.float32, module_bytes=module_bytes)
        reduction.close()
    return costs


# With both plans, and the first backward, which has none, this makes 17 backwards.
NUM_WARM_UP = 3
NUM_OBSERVED = 5

# Less than this share of a backward is not worth changing plans for, nor could it be measured.
_WORTHWHILE = 0.01


@dataclass(slots=True)
class _Observation:
    """One backward, by marks of a clock."""

    start: Any
    arrivals: dict[int, Any] = field(default_factory=dict)
    backward_end: Any = None
    reduced: Any = None


@dataclass(kw_only=True, eq=False)
class PlanTuner(BackwardObserver):
    """Finds the best plan for one set of trainable parameters (Note: tuning)."""

    first_plan: Sequence[BucketSpec]
    params: Sequence[Tensor]
    specs: Sequence[ParameterSpec]
    collectives: Collectives
    meter: CostMeter
    clock: Clock
    say: Callable[[str], None]
    reduce_dtype: str | None
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

    def backward_began(self) -> None:
        if is_being_captured(self.collectives.device):
            self.close()
        elif self._hooks:
            self._current = _Observation(self.clock.mark())

    def backward_ended(self) -> None:
        if self._current is not None:
            self._current.backward_end = self.clock.mark()

    def gradients_final(self) -> None:
        if self._current is not None:
            self._current.reduced = self.clock.mark()
            self._observed.append(self._current)

    def end(self) -> Sequence[BucketSpec] | None:
        """Count a backward that has ended, well or not; return the plan for the next one if it changes."""
        self._current = None
        if self.is_settled:
            return None
        self._num_backwards += 1
        phase, position = divmod(self._num_backwards, NUM_WARM_UP + NUM_OBSERVED)
        if position == NUM_WARM_UP:
            self._observed.clear()
            if not self._hooks:
                self._hooks = [hook_on_node(self.params[i], partial(self._mark_arrival, i)) for i in self._members]
        if position > 0:
            return None
        return self._propose() if phase == 1 else self._decide()

    def close(self) -> None:
        """Stop observing; the plan stays as it is."""
        self.is_settled = True
        self._current = None
        self._observed.clear()
        for _, handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def _mark_arrival(self, param_index: int, *_: object) -> None:
        if self._current is not None:
            self._current.arrivals[param_index] = self.clock.mark()

    def _propose(self) -> Sequence[BucketSpec] | None:
        dense = [i for i in self._members if not self.specs[i].sparse]
        largest = max(dense, key=lambda i: self.specs[i].num_bytes)
        cost = self.meter.measure(
            dtype=self.params[largest].dtype, module_bytes=sum(self.specs[i].num_bytes for i in dense)
        )
        proposal = self._compute(cost) if self.collectives.rank == 0 and self._observed else None
        message = None if proposal is None else [asdict(bucket) for bucket in proposal]
        agreed: list[dict[str, Any]] | None = self.collectives.broadcast_json(message)
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
        # With the costs that the plan is computed for: whoever simulates plans later sees what is expected here.
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
        """Return the parameters in order of arrival, and what was seen of them.

        What was missing once may be missing again, and a bucket waits for all its members: it counts as missing.
        """
        seconds = self.clock.seconds
        ready_s = {
            i: statistics.median(seconds(seen.start, seen.arrivals[i]) for seen in self._observed)
            for i in self._members
            if all(i in seen.arrivals for seen in self._observed)
        }
        arrived = sorted(ready_s, key=lambda i: ready_s[i])
        order = arrived + [i for i in self._members if i not in ready_s]
        backward_s = statistics.median(seconds(seen.start, seen.backward_end) for seen in self._observed)
        return order, Profile(
            [self.specs[i] for i in order],
            [ready_s[i] for i in arrived],
            backward_s=max(backward_s, *ready_s.values(), 0.0),
            cost=cost,
            num_ranks=self.collectives.world_size,
            reduce_dtype=self.reduce_dtype,
        )

    def _decide(self) -> Sequence[BucketSpec] | None:
        is_better = False
        if self.collectives.rank == 0 and self._observed:
            now_s = self._total_s()
            first, now = statistics.median(self._first_s), statistics.median(now_s)
            noise = max(statistics.median(abs(s - first) for s in self._first_s), _WORTHWHILE * first)
            is_better = now < first - noise
            within = ", which is within the noise" if first - noise <= now < first else ""
            outcome = "they stay" if is_better else f"back to {len(self.first_plan)}"
            self.decision += f", measured {now * 1e3:.2f} instead of {first * 1e3:.2f} ms{within}; {outcome}"
        is_better = self.collectives.broadcast_json(is_better)
        self._settle()
        return None if is_better else self.first_plan

    def _total_s(self) -> list[float]:
        return [self.clock.seconds(seen.start, seen.reduced) for seen in self._observed]

    def _settle(self) -> None:
        self.close()
        if self.collectives.rank == 0:
            self.say(f"bucketddp: {self.decision}.")
