"""What a reduction costs on a network and as a dtype, the profile of a backward, and a step simulated with both. Pure.

Note: cost of an all-reduce
    Latency + bytes x time per byte, the usual alpha-beta model (Thakur, Rabenseifner, Gropp 2005). On n ranks each link
    carries 2(n-1)/n of the bytes. A ring takes 2(n-1) hops one after the other, a double binary tree 2 log2 n (Sanders,
    Speck, Träff 2009). `Network` takes the fewer hops, as NCCL does, at full bandwidth. It knows no hierarchy: every
    rank has a link of its own, and all links are alike.

Note: halves
    An all-reduce is a reduce-scatter and then an all-gather; each takes half of the hops and half of the bytes. To
    reduce a bucket to its owner, or to broadcast it from there, is counted in the same way: each link carries it once.

Note: timeline
    Reductions run one after the other, in launch order: one begins when its bucket is complete and the one before has
    ended. A bucket with a gradient that never arrives is complete when backward ends. A sparse gradient is exchanged
    after backward and costs the latency only, because its size is not known in advance. The flags in the last bucket,
    and the padding between gradients, are not counted.

    A bucket that travels as another dtype is encoded when it is complete, which makes backward late by as much. When
    backward has ended, buckets are decoded in launch order, each as soon as it is reduced. Both count as waiting.

    A sharded bucket is reduce-scattered, and all-gathered at the end of the optimizer's step, which waits for it
    (Note: halves). That the optimizer then steps fewer parameters is not counted.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from lightning_bucketddp.config import BLOCK_NUMEL, REDUCE_DTYPES
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec
from lightning_bucketddp.wording import load_printable_json


@dataclass(frozen=True, slots=True)
class AllReduceCost:
    """Seconds that an all-reduce takes (Note: cost of an all-reduce)."""

    latency_s: float
    s_per_byte: float

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes * self.s_per_byte

    def slower(self, factor: float) -> AllReduceCost:
        """Return the cost where everything takes `factor` times as long."""
        return AllReduceCost(self.latency_s * factor, self.s_per_byte * factor)

    @classmethod
    def fit(cls, seconds_by_bytes: Mapping[int, Sequence[float]]) -> AllReduceCost:
        """Fit a line to the medians at each size, by relative errors: otherwise the largest size alone would count."""
        medians = {num_bytes: statistics.median(seconds) for num_bytes, seconds in seconds_by_bytes.items()}
        weights = {num_bytes: 1 / max(seconds, 1e-9) ** 2 for num_bytes, seconds in medians.items()}
        total = sum(weights.values())
        mean_bytes = sum(w * b for b, w in weights.items()) / total
        mean_s = sum(w * medians[b] for b, w in weights.items()) / total
        spread = sum(w * (b - mean_bytes) ** 2 for b, w in weights.items())
        slope = sum(w * (b - mean_bytes) * (medians[b] - mean_s) for b, w in weights.items()) / spread if spread else 0
        # Noise can tilt the line so far that a cost would be negative.
        slope = min(max(slope, 0.0), mean_s / mean_bytes) if mean_bytes else 0.0
        return cls(latency_s=mean_s - slope * mean_bytes, s_per_byte=slope)


@dataclass(frozen=True, slots=True)
class Network:
    """Links between ranks."""

    name: str
    bytes_per_s: float  # of one rank's link, in each direction
    hop_s: float  # how long the shortest message takes to the next rank

    def all_reduce(self, num_ranks: int) -> AllReduceCost:
        return AllReduceCost(_num_hops(num_ranks) * self.hop_s, share_of_a_link(num_ranks) / self.bytes_per_s)

    @classmethod
    def measured(cls, cost: AllReduceCost, *, num_ranks: int) -> Network:
        """Return the network on which `num_ranks` ranks have measured `cost`."""
        per_byte = max(cost.s_per_byte, 1e-18)
        return cls("measured", share_of_a_link(num_ranks) / per_byte, cost.latency_s / _num_hops(num_ranks))


def _num_hops(num_ranks: int) -> int:
    return 2 * min(num_ranks - 1, math.ceil(math.log2(num_ranks)))


def share_of_a_link(num_ranks: int) -> float:
    """Return how often each link carries the bytes that are reduced (Note: cost of an all-reduce)."""
    return 2 * (num_ranks - 1) / num_ranks


@dataclass(frozen=True, slots=True)
class Profile:
    """A backward on one rank. Times are seconds since it began."""

    specs: Sequence[ParameterSpec]  # in order of arrival; then those whose gradients never arrived
    ready_s: Sequence[float]  # when each gradient that arrived was ready
    backward_s: float  # when backward had ended, without reductions
    cost: AllReduceCost | None  # of an all-reduce during backward; None: not measured, or not well enough
    num_ranks: int
    forward_s: float = 0.0  # how long the forward before it took; 0: not known
    optimizer_s: float = 0.0  # how long the optimizer's step after it took; 0: not known
    reduce_dtype: str | None = None  # the dtype in which gradients travelled when `cost` was measured; None: their own

    def __post_init__(self) -> None:
        if self.reduce_dtype not in (None, *REDUCE_DTYPES):
            raise ValueError(f"gradients cannot travel as {self.reduce_dtype!r}")

    @property
    def arrived(self) -> range:
        return range(len(self.ready_s))

    @property
    def missing(self) -> range:
        return range(len(self.ready_s), len(self.specs))

    @property
    def dense_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs if not spec.sparse)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        content: dict[str, Any] = load_printable_json(text)
        specs = [ParameterSpec(**spec) for spec in content.pop("specs")]
        cost = content.pop("cost")
        return cls(specs=specs, cost=None if cost is None else AllReduceCost(**cost), **content)


BYTES_PER_VALUE = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1 + 4 / BLOCK_NUMEL}


@dataclass(frozen=True, slots=True)
class Codec:
    """Seconds per byte of gradients that encoding and decoding take."""

    encode_s_per_byte: float = 0.0  # on the device that runs backward, when a bucket leaves
    decode_s_per_byte: float = 0.0  # on the same device after backward, when the bucket is reduced
    inline_s_per_byte: float = 0.0  # between the exchanges of a bucket, while all other buckets wait


NO_CODEC = Codec()
# By `reduce_dtype`, for fp32 gradients. A dtype that is not in it takes no time.
Codecs = Mapping[str, Codec]
NO_CODECS: Codecs = MappingProxyType({})


def measured_between(wires: Mapping[str, AllReduceCost], codecs: Codecs) -> Codecs:
    """Return `codecs` with the additional time of each dtype in `wires`: costs that ranks measured together.

    Ranks that share cores encode slower than one alone, and a backend may be slow in adding up 16 bits.
    """
    found = dict(codecs)
    for name in wires.keys() & codecs.keys():
        expected = BYTES_PER_VALUE[name] / 4 * wires["fp32"].s_per_byte + sum(astuple(codecs[name]))
        more = max(wires[name].s_per_byte - expected, 0.0)
        found[name] = replace(codecs[name], inline_s_per_byte=codecs[name].inline_s_per_byte + more)
    return found


@dataclass(frozen=True, slots=True)
class Wire:
    """The format in which gradients travel; by default their own dtype.

    int8 travels by an all-to-all and an all-gather. They carry what an all-reduce does (Note: halves), but each is
    launched and waited for by itself: the latency counts twice.
    """

    share: float = 1.0  # bytes that travel for each byte of gradients
    num_collectives: int = 1
    codec: Codec = NO_CODEC

    @classmethod
    def of(cls, reduce_dtype: str | None, specs: Sequence[ParameterSpec], codecs: Codecs = NO_CODECS) -> Wire:
        """Return the format of the gradients in `specs` with this `reduce_dtype`."""
        own_bytes = sum(spec.num_bytes for spec in specs)
        if reduce_dtype is None or not own_bytes:
            return cls()
        # Specs that were made from recorded buckets have no dtype.
        num_values = sum(spec.num_bytes / (spec.dtype or torch.float32).itemsize for spec in specs)
        share = num_values * BYTES_PER_VALUE[reduce_dtype] / own_bytes
        if share == 1:
            return cls()
        return cls(share, 2 if reduce_dtype == "int8" else 1, codecs.get(reduce_dtype, NO_CODEC))

    def cost(self, own: AllReduceCost) -> AllReduceCost:
        """Return the cost per byte of gradients in this format; `own` is that of their own dtype."""
        s_per_byte = own.s_per_byte * self.share + self.codec.inline_s_per_byte
        return AllReduceCost(own.latency_s * self.num_collectives, s_per_byte)

    def own_cost(self, measured: AllReduceCost) -> AllReduceCost:
        """Return the cost in the gradients' own dtype; `measured` is that of this format, with all of its codec."""
        s_per_byte = max(measured.s_per_byte - sum(astuple(self.codec)), 0.0) / self.share
        return AllReduceCost(measured.latency_s / self.num_collectives, s_per_byte)


@dataclass(frozen=True, slots=True)
class SimulatedBucket:
    """One reduction. Times are seconds since backward began."""

    num_bytes: int
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One simulated step with a plan (Note: timeline)."""

    plan: Sequence[BucketSpec]  # by position in the profile
    buckets: Sequence[SimulatedBucket]
    forward_s: float
    backward_s: float
    optimizer_s: float
    weights_s: float = 0.0  # how long the exchanges of weights take, one after the other, at the end of the step
    decoded_s: float = 0.0  # when the last bucket was decoded, counted from the start of backward

    @property
    def end_s(self) -> float:
        """Return when backward and the last reduction have ended, and all buckets are decoded."""
        return max([self.backward_s, self.decoded_s, *(bucket.end_s for bucket in self.buckets[-1:])])

    @property
    def exposed_s(self) -> float:
        """Return how long the step waits for reductions after backward, and for weights at its end."""
        return self.end_s - self.backward_s + self.weights_s

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s

    @property
    def communication_s(self) -> float:
        return sum(bucket.end_s - bucket.start_s for bucket in self.buckets) + self.weights_s

    @property
    def overlap(self) -> float:
        """Return the share of communication that is hidden behind computation; 1 if there is no communication."""
        return 1 - self.exposed_s / self.communication_s if self.communication_s > 0 else 1.0

    @property
    def scaling_efficiency(self) -> float:
        """Return the share of a step that is not spent waiting for other ranks."""
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
    ready = end = encoding = weights = 0.0
    for bucket in plan:
        num_bytes = 0 if bucket.sparse else sum(profile.specs[i].num_bytes for i in bucket.members)
        encoding += num_bytes * codec.encode_s_per_byte
        complete = profile.backward_s
        if bucket.members and not bucket.sparse and all(i in profile.arrived for i in bucket.members):
            complete = max(profile.ready_s[i] for i in bucket.members)
        # Buckets leave by index: one that is complete waits for those before it.
        ready = max(ready, complete + encoding)
        start = max(ready, end)
        if bucket.sharded is None:
            end = start + cost.seconds(num_bytes)
        else:  # Note: halves
            end = start + cost.seconds(num_bytes) / 2
            weights += (cost_of_weights or cost).seconds(num_bytes) / 2
        buckets.append(SimulatedBucket(num_bytes, ready, start, end))
    decoded = profile.backward_s + encoding
    for reduced in buckets:
        decoded = max(decoded, reduced.end_s) + reduced.num_bytes * codec.decode_s_per_byte
    return Timeline(plan, buckets, profile.forward_s, profile.backward_s, profile.optimizer_s, weights, decoded)


def cost_until(profile: Profile, plan: Sequence[BucketSpec], *, end_s: float) -> AllReduceCost:
    """Return the cost in `profile`, scaled by the largest factor up to 4 (or 1/4) with which `plan` ends by `end_s`."""
    assert profile.cost is not None
    low, high = 1 / 4, 4.0
    for _ in range(20):
        middle = (low * high) ** 0.5
        if simulate(profile, plan, profile.cost.slower(middle)).end_s <= end_s:
            low = middle
        else:
            high = middle
    return profile.cost.slower(low)
