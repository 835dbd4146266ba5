"""What a module would do on networks and numbers of ranks, as `bucketddp plan` shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_bucketddp.commands.plan.backward_times import BackwardTimes
from lightning_bucketddp.commands.plan.chart import Axis, Series, draw
from lightning_bucketddp.commands.usage import UsageError
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.planning.all_reduce_cost import Network
from lightning_bucketddp.planning.backward_profile import Profile
from lightning_bucketddp.planning.optimal_plan import NETWORKS, Prediction, predict
from lightning_bucketddp.planning.plan import BucketSpec
from lightning_bucketddp.recording.typical_step import NO_COST

_LARGEST = 1024
MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Assumed:
    """A network, and in words where its numbers come from."""

    network: Network
    origin: str

    def __str__(self) -> str:
        network = self.network
        return (
            f"{network.name}: {network.bytes_per_s / 1e9:.4g} GB/s from each rank, {network.hop_s * 1e6:.3g} us per hop"
            f" ({self.origin})"
        )


@dataclass(frozen=True, slots=True)
class Scaling:
    """Predictions for one network, by number of ranks."""

    assumed: Assumed
    by_ranks: dict[int, Prediction]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlan:
    """All that `bucketddp plan` has to say.

    Attributes:
        module: the name of the class.
        device: what the plan is for.
        times: when gradients are ready.
        buckets: the plan, by position in the profile.
        origin: in words, how it was made.
        num_ranks: the number of ranks that it is for.
        scalings: empty if no times are known.
    """

    module: str
    device: str
    times: BackwardTimes
    buckets: Sequence[BucketSpec]
    origin: str
    num_ranks: int
    scalings: Sequence[Scaling]

    @property
    def profile(self) -> Profile:
        return self.times.profile

    def bytes_of(self, bucket: BucketSpec) -> int:
        return sum(self.profile.specs[i].num_bytes for i in bucket.members)

    def names_in(self, bucket: BucketSpec) -> list[str]:
        return [self.profile.specs[i].name for i in bucket.members]

    def to_json(self) -> dict[str, Any]:
        profile = self.profile
        return {
            "module": self.module,
            "device": self.device,
            "num_parameter_tensors": len(profile.specs),
            "gradient_bytes": sum(spec.num_bytes for spec in profile.specs),
            "ranks": self.num_ranks,
            "plan": self.origin,
            "buckets": [
                {"bytes": self.bytes_of(b), "alone": b.alone, "sparse": b.sparse, "parameters": self.names_in(b)}
                for b in self.buckets
            ],
            "times": {
                "origin": self.times.origin,
                "is_of_cpu": self.times.is_of_cpu,
                "forward_s": profile.forward_s,
                "backward_s": profile.backward_s,
                "optimizer_s": profile.optimizer_s,
            },
            "networks": [_network_json(scaling) for scaling in self.scalings],
        }

    def to_svg(self) -> str:
        """Scaling efficiency by number of ranks."""
        series = [
            Series(scaling.assumed.network.name, [(n, 100 * efficiency) for n, efficiency in _efficiencies(scaling)])
            for scaling in self.scalings
        ]
        return draw(
            series,
            title=f"{self.module}: predicted scaling efficiency, from {self.times.kind} times"
            + (" of a CPU, not of a GPU" if self.times.is_of_cpu else ""),
            x=Axis(label="ranks", log_base=2),
            y=Axis(label="efficiency, %", low=0, high=100),
        )


def scale(times: BackwardTimes, config: ReducerConfig, assumed: Assumed, *, num_ranks: int) -> Scaling:
    """Predictions for 1, 2, 4 ... 1,024 ranks, and for `num_ranks`."""
    powers = [2**n for n in range(_LARGEST.bit_length())]
    return Scaling(
        assumed,
        {n: predict(times.profile, config, assumed.network.all_reduce(n)) for n in sorted({*powers, num_ranks})},
    )


def find_network(text: str, profile: Profile) -> Assumed:
    """A network by name, as GBIT,LATENCY_US, or the one that the profile was measured on."""
    if text in NETWORKS:
        return Assumed(NETWORKS[text], f"nominal figures of {text}")
    if text == MEASURED:
        if profile.num_ranks < 2:
            raise UsageError(f"--network {MEASURED} needs a --profile that was recorded with two ranks or more.")
        if profile.cost is None:
            raise UsageError(
                f"--network {MEASURED} needs a --profile that tells what an all-reduce costs: {NO_COST}. Name a"
                ' network, or record a run with `bucket_cap_mb="auto"`, which measures it.'
            )
        network = Network.measured(profile.cost, num_ranks=profile.num_ranks)
        return Assumed(network, f"measured between {profile.num_ranks} ranks when the profile was recorded")
    try:
        gbit, latency_us = (float(number) for number in text.split(","))
        if not (gbit > 0 and latency_us >= 0):
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--network {text!r} is not known: pass {', '.join([*NETWORKS, MEASURED])}, or GBIT,LATENCY_US, such as"
            " 25,10."
        ) from None
    return Assumed(Network(f"{gbit:g} Gbit", gbit * 1e9 / 8, latency_us * 1e-6), "as you gave it")


def _efficiencies(scaling: Scaling) -> Iterator[tuple[int, float]]:
    for num_ranks, predicted in scaling.by_ranks.items():
        yield num_ranks, predicted.timeline.scaling_efficiency


def _network_json(scaling: Scaling) -> dict[str, Any]:
    network = scaling.assumed.network
    return {
        "name": network.name,
        "bytes_per_s": network.bytes_per_s,
        "hop_s": network.hop_s,
        "origin": scaling.assumed.origin,
        "by_ranks": [
            {
                "ranks": num_ranks,
                "buckets": len(predicted.plan),
                "communication_s": predicted.timeline.communication_s,
                "exposed_s": predicted.timeline.exposed_s,
                "step_s": predicted.timeline.step_s,
                "overlap": predicted.timeline.overlap,
                "efficiency": predicted.timeline.scaling_efficiency,
            }
            for num_ranks, predicted in scaling.by_ranks.items()
        ],
    }
