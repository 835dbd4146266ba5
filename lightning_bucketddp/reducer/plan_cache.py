"""The plans of a module's parameters, made real: one bucket_set for each set of trainable parameters."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_bucketddp.config import AUTO, MIB, ReducerConfig
from lightning_bucketddp.planning.cost import Profile
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec, has_choice, plan_buckets
from lightning_bucketddp.reducer.bucket import LateGradientError
from lightning_bucketddp.reducer.bucket_set import BucketMaker, BucketSet
from lightning_bucketddp.reducer.observer import Clock, ReducerStats, clock_of
from lightning_bucketddp.reducer.plan_tuner import CostMeter, PlanTuner
from lightning_bucketddp.reducer.reduction import Reduction
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.wording import pluralize

log = logging.getLogger(__name__)

# A plan not used for so many backwards belongs to a phase of training that is over. Alternating optimizers come back
# to theirs much sooner.
_FORGET_PLAN_AFTER = 64

# Gradients of this size are reduced where they are. Copying one costs a host much of what its reduction does, and an
# accelerator next to nothing but the memory.
_ALONE_FROM_BYTES = {"cpu": 4 * MIB, "accelerator": 32 * MIB}

Trainable = tuple[bool, ...]


@dataclass(eq=False)
class PlanCache:
    """Makes plans, remembers them, and changes to better ones (Note: tuning). Fields are arguments of `Reducer`."""

    replicas: Replicas
    config: ReducerConfig
    reduction: Reduction
    stats: ReducerStats
    clock: Clock | None
    say: Callable[[str], None]
    maker: BucketMaker | None
    description: str = "no plan yet"
    # What was measured last for `bucket_cap_mb="auto"`, and what was decided then, in words; on rank 0 only.
    profile: Profile | None = None
    tuning: str = ""
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
        self._params = list(parameters.values())
        self._collectives = self.replicas.collectives
        self._clock = self.clock or clock_of(self._collectives.device)
        self._meter = CostMeter(self.reduction, self._collectives, self._clock)

    def describe_outlook(self) -> str:
        """Return how much will be planned, and into how many buckets if gradients arrive in the usual order."""
        members = [index for index in reversed(range(len(self._params))) if self._params[index].requires_grad]
        gradients = f"{sum(self.specs[index].num_bytes for index in members) / MIB:.2f} MiB of gradients"
        if self.maker is not None:  # its optimizers, which are not known yet, have a say in it
            return gradients
        plan = plan_buckets(self.specs, arrived=members, missing=[], caps=self.config.caps)
        return f"{pluralize(len(plan), 'bucket')} planned for {gradients},"

    def late_gradient(self, param_index: int, bucket_index: int) -> LateGradientError:
        return LateGradientError(
            f"Gradient of `{self.specs[param_index].name}` arrived after its bucket {bucket_index} had left (rank"
            f" {self._collectives.global_rank}). The parameter is used more often in this backward than in the first"
            " one. Pass `overlap=False` to the strategy if that is intended."
        )

    def close(self) -> None:
        """Let go of the buffers, and observe nothing any more."""
        for tuner in self._tuners.values():
            tuner.close()
        self._tuners.clear()
        self._bucket_sets.clear()
        self._better.clear()

    def tuner(self, trainable: Trainable) -> PlanTuner | None:
        """Return the tuner of this set, as long as its plan may still change."""
        # Hashing a set of thousands of parameters takes time, in every step: an empty dictionary is not asked.
        return self._tuners.get(trainable) if self._tuners else None

    def is_settled(self, trainable: Trainable) -> bool:
        """Return whether this set has a plan, and keeps it."""
        return trainable in self._bucket_sets and trainable not in self._tuners and trainable not in self._better

    def will_change(self, trainable: Trainable) -> bool:
        """Return whether the next `bucket_set` makes new buffers: who holds the old ones should let go of them."""
        return bool(self._better) and trainable in self._better

    def bucket_set(self, trainable: Trainable) -> BucketSet | None:
        """Return the buckets for a backward that begins; None: no plan is known for this set."""
        if self.will_change(trainable):
            # Gradients that are still in the old buffers are copied like any others.
            old = self._bucket_sets.pop(trainable)
            num_firings, streams = old.num_firings, old.streams
            del old
            # One that goes back to the first plan has no tuner any more.
            origin = ", computed" if trainable in self._tuners else ""
            self._place(trainable, self._better.pop(trainable), num_firings, streams, origin=origin)
        bucket_set = self._bucket_sets.get(trainable)
        if bucket_set is not None:
            bucket_set.last_used = self.stats.num_backwards
        return bucket_set

    def make(self, trainable: Trainable, order: Sequence[int], streams: set[torch.cuda.Stream]) -> BucketSet:
        """Plan from the `order` in which hooks fired in a backward, each as often as it did, and on which `streams`."""
        self.replicas.agree()
        in_order_of_last_arrival = list(dict.fromkeys(reversed(order)))[::-1]
        arrived: list[int] = self._collectives.broadcast_json(in_order_of_last_arrival)
        seen = set(arrived)
        # What is registered last usually gets its gradient first.
        missing = [i for i in reversed(range(len(self._params))) if trainable[i] and i not in seen]
        if self.maker is None:
            plan = plan_buckets(self.specs, arrived=arrived, missing=missing, caps=self.config.caps)
        else:
            plan = self.maker.plan(
                self.specs,
                self._params,
                arrived=arrived,
                missing=missing,
                caps=self.config.caps,
                alignment=self.config.alignment,
            )
        oldest = self.stats.num_backwards - _FORGET_PLAN_AFTER
        for unused in [key for key, known in self._bucket_sets.items() if known.last_used < oldest]:
            del self._bucket_sets[unused]
            self._better.pop(unused, None)
            if unused in self._tuners:
                self._tuners.pop(unused).close()
        # Another plan would move optimizer state between ranks; a communication hook keeps state by bucket; and who
        # wants runs to repeat wants no plan that depends on time.
        config = self.config
        is_auto = config.bucket_cap_mb == AUTO and config.overlap and not torch.are_deterministic_algorithms_enabled()
        is_free = self.maker is None and config.comm_hook is None and self._collectives.world_size > 1
        if is_auto and is_free and has_choice(plan):
            self._tuners[trainable] = PlanTuner(
                first_plan=plan,
                params=self._params,
                specs=self.specs,
                collectives=self._collectives,
                meter=self._meter,
                clock=self._clock,
                say=self.say,
                reduce_dtype=self.config.reduce_dtype,
            )
        return self._place(trainable, plan, Counter(order), streams)

    def end_backward(self, trainable: Trainable) -> None:
        """Count a backward that was observed and has ended, well or not, on all ranks."""
        tuner = self._tuners[trainable]
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
            plan,
            params=self._params,
            num_firings=num_firings,
            streams=streams,
            trainable=trainable,
            collectives=self._collectives,
            config=self.config,
            maker=self.maker,
        )
        bucket_set.last_used = self.stats.num_backwards
        self.stats.num_plans += 1
        bucket_set.version = self.stats.num_plans
        self.description = f"{bucket_set}{origin}"
        if self._collectives.rank == 0:
            log.info("bucketddp: plan %d: %s", self.stats.num_plans, self.description)
        return bucket_set


def spec_of(name: str, param: Tensor, *, device: torch.device, sparse: bool, may_be_alone: bool) -> ParameterSpec:
    kind = f"{param.dtype} {device}"
    is_large = param.nbytes >= _ALONE_FROM_BYTES["cpu" if device.type == "cpu" else "accelerator"]
    return ParameterSpec(
        name, num_bytes=param.nbytes, kind=kind, sparse=sparse, alone=may_be_alone and is_large and not sparse
    )
