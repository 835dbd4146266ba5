"""The cost of an all-reduce: measured here, or computed for other networks and more ranks. Pure.

Note: cost of an all-reduce
    Latency + bytes x time per byte, the usual alpha-beta model (Thakur, Rabenseifner, Gropp 2005). On n ranks each link
    carries 2(n-1)/n of the bytes, which no algorithm can beat and rings and double binary trees reach. A ring takes
    2(n-1) hops one after the other, a tree 2 log2 n; NCCL has had double binary trees since 2.4 (Sanders, Speck, Träff
    2009: full bandwidth, logarithmic latency) and takes what is faster. So does `Network`: the fewer hops, at full
    bandwidth. It knows no hierarchy: every rank has a link of its own, and all links are alike.

Note: halves
    An all-reduce is a reduce-scatter and then an all-gather, and each takes half of the hops and half of the bytes. So
    where gradients are reduce-scattered and weights are all-gathered, each bucket counts half of its bytes twice. To
    reduce a bucket to its owner, or to broadcast it from there, is counted in the same way: each link carries it once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
        """Fit a line to the medians of the repetitions at each size, by relative errors.

        By absolute errors the largest size alone would decide, and the latency be what remains.
        """
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
        """Return what an all-reduce between `num_ranks` costs."""
        if num_ranks == 1:
            return AllReduceCost(0.0, 0.0)
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
