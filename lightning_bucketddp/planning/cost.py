"""What a reduction costs, measured or computed for other networks and dtypes, and the profile of a backward. Pure.

Note: cost of an all-reduce
    Latency + bytes x time per byte, the usual alpha-beta model (Thakur, Rabenseifner, Gropp 2005). On n ranks each link
    carries 2(n-1)/n of the bytes. A ring takes 2(n-1) hops one after the other, a double binary tree 2 log2 n (Sanders,
    Speck, Träff 2009). `Network` takes the fewer hops, as NCCL does, at full bandwidth. It knows no hierarchy: every
    rank has a link of its own, and all links are alike.

Note: halves
    An all-reduce is a reduce-scatter and then an all-gather, and each takes half of the hops and half of the bytes. So
    where gradients are reduce-scattered and weights are all-gathered, each bucket counts half of its bytes twice. To
    reduce a bucket to its owner, or to broadcast it from there, is counted in the same way: each link carries it once.
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
from lightning_bucketddp.planning.plan import ParameterSpec
from lightning_bucketddp.wording import load_printable_json


@dataclass(frozen=True, slots=True)
class AllReduceCost:
    """Seconds that an all-reduce takes (Note: cost of an all-reduce)."""

    latency_s: float
    s_per_byte: float

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes * self.s_per_byte

    def slower(self, factor: float) -> AllReduceCost:
        """Return the cost on a network that takes `factor` times as long."""
        return AllReduceCost(self.latency_s * factor, self.s_per_byte * factor)

    def halved(self) -> AllReduceCost:
        """Return the cost of a reduce-scatter, or of an all-gather (Note: halves)."""
        return self.slower(0.5)

    @classmethod
    def fit(cls, seconds_by_bytes: Mapping[int, Sequence[float]]) -> AllReduceCost:
        """Fit a line to the medians at each size, by relative errors: else the largest size alone would decide."""
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

    name: str  # for people
    bytes_per_s: float  # that one rank's link carries in each direction
    hop_s: float  # that the shortest message takes to the next rank

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

    specs: Sequence[ParameterSpec]  # in order of arrival, and after them those whose gradients never came
    ready_s: Sequence[float]  # when the gradient of each that arrived was there
    backward_s: float  # when backward had ended, without reductions
    cost: AllReduceCost | None  # beside such a backward; None: it was not measured, or not well enough
    num_ranks: int
    forward_s: float = 0.0  # how long the forward before it took; 0: not known
    optimizer_s: float = 0.0  # how long the optimizer's step after it took; 0: not known
    reduce_dtype: str | None = None  # what gradients travelled as when `cost` was measured; None: as what they are

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
_NUM_COLLECTIVES = {"int8": 2}


@dataclass(frozen=True, slots=True)
class Codec:
    """Seconds for a byte of gradients, in which something else than the network is busy."""

    encode_s_per_byte: float = 0.0  # where backward runs, when a bucket leaves
    decode_s_per_byte: float = 0.0  # the same after backward, when it has come back
    inline_s_per_byte: float = 0.0  # between the exchanges of a bucket, while all others wait


NO_CODEC = Codec()
# By `reduce_dtype`, for fp32 gradients. What is not in it counts as nothing.
Codecs = Mapping[str, Codec]
NO_CODECS: Codecs = MappingProxyType({})


def measured_between(wires: Mapping[str, AllReduceCost], codecs: Codecs) -> Codecs:
    """Return `codecs` with what else a dtype takes where ranks have measured `wires` together, fp32 among them.

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
    """What gradients travel as; by default as what they are.

    int8 travels by an all-to-all and an all-gather. They carry what an all-reduce does (Note: halves), but each is
    launched and waited for by itself: the latency counts twice.
    """

    share: float = 1.0  # bytes that travel for each byte of gradients
    num_collectives: int = 1
    codec: Codec = NO_CODEC

    @classmethod
    def of(cls, reduce_dtype: str | None, specs: Sequence[ParameterSpec], codecs: Codecs = NO_CODECS) -> Wire:
        """Return what `reduce_dtype` makes of the gradients in `specs`."""
        own_bytes = sum(spec.num_bytes for spec in specs)
        if reduce_dtype is None or not own_bytes:
            return cls()
        # What was made of recorded buckets does not know dtypes.
        num_values = sum(spec.num_bytes / (spec.dtype or torch.float32).itemsize for spec in specs)
        share = num_values * BYTES_PER_VALUE[reduce_dtype] / own_bytes
        if share == 1:
            return cls()
        return cls(share, _NUM_COLLECTIVES.get(reduce_dtype, 1), codecs.get(reduce_dtype, NO_CODEC))

    def cost(self, own: AllReduceCost) -> AllReduceCost:
        """Return the cost per byte of gradients, if in their own dtype it is `own`."""
        s_per_byte = own.s_per_byte * self.share + self.codec.inline_s_per_byte
        return AllReduceCost(own.latency_s * self.num_collectives, s_per_byte)

    def own_cost(self, measured: AllReduceCost) -> AllReduceCost:
        """Return the cost in their own dtype, if on this wire, with all of the codec, it has been `measured`."""
        codec_s_per_byte = sum(astuple(self.codec))
        s_per_byte = max(measured.s_per_byte - codec_s_per_byte, 0.0) / self.share
        return AllReduceCost(measured.latency_s / self.num_collectives, s_per_byte)
