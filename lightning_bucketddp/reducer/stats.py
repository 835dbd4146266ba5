"""What the reducer did, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ReducerStats:
    """Counters since the reducer was made.

    Attributes:
        num_backwards: synchronised backwards.
        num_reductions: buckets reduced in them.
        bytes_reduced: size of those buckets, in the gradients' own dtype.
        num_plans: plans made; more than one when the set of trainable parameters changed, or a better
            one was computed.
        num_unused: gradients that were missing on this rank and filled in with zeros.
        num_skipped: training steps that returned nothing, on all ranks together.
        num_nonfinite: backwards in which a loss or a gradient was infinite or nan on some rank.
        num_outer_steps: with `local_steps`, how often islands have exchanged weights.
        outer_bytes: what this rank gave to the network for that.
        outer_s: how many seconds that took, with the time that the islands waited for each other.
    """

    num_backwards: int = 0
    num_reductions: int = 0
    bytes_reduced: int = 0
    num_plans: int = 0
    num_unused: int = 0
    num_skipped: int = 0
    num_nonfinite: int = 0
    num_outer_steps: int = 0
    outer_bytes: int = 0
    outer_s: float = 0.0
