"""Records of runs that never were, but could have been: all times follow from a few numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_bucketddp.planning.cost import AllReduceCost, Profile
from lightning_bucketddp.planning.plan import ParameterSpec
from lightning_bucketddp.recording.schema import (
    BucketTimes,
    GatherTimes,
    RecordedBucket,
    RecordedPlan,
    Run,
    Span,
    Step,
    Tuning,
    path_of,
    write,
)

DATA_S, FORWARD_S, BACKWARD_S, OPTIMIZER_S = 0.002, 0.010, 0.020, 0.003
# Each rank begins so much after the one before.
STAGGER_S = 0.001
TUNING = "4 buckets stay"
COST = AllReduceCost(latency_s=0.0002, s_per_byte=1e-9)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A run to write down.

    Attributes:
        num_ranks: how many ranks there are.
        num_buckets: each has three parameters and `bucket_bytes`.
        bucket_bytes: the size of each.
        steps: the steps recorded.
        slowness: by rank, the time that its forward and backward take, as a multiple of the others'.
        clock_s: by rank, what its clock shows when that of rank 0 shows 0.
        with_profile: rank 0 writes down its profile.
    """

    num_ranks: int = 2
    num_buckets: int = 4
    bucket_bytes: int = 6 * 2**20
    steps: range = range(0, 50, 10)
    slowness: dict[int, float] = field(default_factory=dict)
    clock_s: dict[int, float] = field(default_factory=dict)
    with_profile: bool = True

    def write(self, folder: Path) -> Path:
        """Write the file of each rank."""
        folder.mkdir(parents=True, exist_ok=True)
        steps = [self.step(number) for number in self.steps]
        for rank in range(self.num_ranks):
            with path_of(folder, rank).open("w") as file:
                write(self._run(rank), file)
                write(self.plan, file)
                if rank == 0 and self.with_profile:
                    write(self.profile, file)
                    write(Tuning(TUNING), file)
                for step in steps:
                    write(step[rank], file)
        return folder

    @property
    def plan(self) -> RecordedPlan:
        third = self.bucket_bytes // 3
        return RecordedPlan(
            1, [RecordedBucket(_names(index), [third] * 2 + [self.bucket_bytes - 2 * third]) for index in self._indices]
        )

    @property
    def profile(self) -> Profile:
        specs = [
            ParameterSpec(name, size, "float32")
            for bucket in self.plan.buckets
            for name, size in zip(bucket.parameters, bucket.sizes, strict=True)
        ]
        ready_s = [BACKWARD_S * (i + 1) / len(specs) for i in range(len(specs))]
        return Profile(specs, ready_s, BACKWARD_S, COST, self.num_ranks, FORWARD_S, OPTIMIZER_S)

    def step(self, number: int) -> list[Step]:
        """What each rank writes down of a step: by its own clock."""
        # Other steps in between take as long.
        begin = [100.0 + 0.1 * number + STAGGER_S * rank for rank in range(self.num_ranks)]
        slowness = [self.slowness.get(rank, 1.0) for rank in range(self.num_ranks)]
        backward = [start + DATA_S + slow * FORWARD_S for start, slow in zip(begin, slowness, strict=True)]
        ready = [
            [start + slow * BACKWARD_S * (index + 1) / self.num_buckets for index in self._indices]
            for start, slow in zip(backward, slowness, strict=True)
        ]
        ended: list[float] = []
        for index in self._indices:
            last = max(times[index] for times in ready)
            ended.append(max([last, *ended[-1:]]) + COST.seconds(self.bucket_bytes))
        return [
            self._step_of_rank(rank, number, begin=begin[rank], backward=backward[rank], ready=ready[rank], ended=ended)
            for rank in range(self.num_ranks)
        ]

    def _step_of_rank(
        self, rank: int, number: int, *, begin: float, backward: float, ready: list[float], ended: list[float]
    ) -> Step:
        backward_end = backward + self.slowness.get(rank, 1.0) * BACKWARD_S
        end = max([backward_end, *ended])
        marks = [begin, begin + DATA_S, backward, backward_end, end, end + OPTIMIZER_S]
        here = self.clock_s.get(rank, 0.0)
        names = ("data", "forward", "backward", "exposed", "optimizer")
        return Step(
            step=number,
            plan=1,
            spans=[Span(name, here + marks[i], here + marks[i + 1]) for i, name in enumerate(names)],
            buckets=[BucketTimes(here + r, here + r, here + e) for r, e in zip(ready, ended, strict=True)],
            bytes_on_wire=self.num_buckets * self.bucket_bytes,
            memory_bytes=3 * 2**30,
        )

    def _run(self, rank: int) -> Run:
        return Run(
            rank,
            self.num_ranks,
            host=f"node{rank // 8}",
            device="NVIDIA H200",
            backend="nccl",
            num_parameters=3 * self.num_buckets,
            gradient_bytes=self.num_buckets * self.bucket_bytes,
            options={"bucket_cap_mb": "auto", "reduce_dtype": None},
        )

    @property
    def _indices(self) -> range:
        return range(self.num_buckets)


def with_weights(step: Step) -> Step:
    """A step that ends by waiting for the weights of buckets 0 and 3: 2 ms of its optimizer's time."""
    *rest, optimizer = step.spans
    since_s, until_s = optimizer.end_s - 0.002, optimizer.end_s
    spans = [*rest, replace(optimizer, end_s=since_s), Span("weights", since_s, until_s)]
    gathers = [GatherTimes(0, since_s, until_s - 0.001), GatherTimes(3, since_s, until_s)]
    return replace(step, spans=spans, gathers=gathers)


def _names(index: int) -> list[str]:
    return [f"layers.{index}.{name}" for name in ("norm.weight", "linear.bias", "linear.weight")]
