"""What the reducer did, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OuterStepStats:
    """An exchange of weights between islands.

    Attributes:
        step: how many steps the optimizers had taken.
        seconds: how long it took, with the time that the islands waited for each other.
        num_bytes: what this rank gave to the network.
    """

    step: int
    seconds: float
    num_bytes: int


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
        outer_steps: with `local_steps`, each exchange of weights between the islands.
    """

    num_backwards: int = 0
    num_reductions: int = 0
    bytes_reduced: int = 0
    num_plans: int = 0
    num_unused: int = 0
    num_skipped: int = 0
    num_nonfinite: int = 0
    outer_steps: list[OuterStepStats] = field(default_factory=list)

    @property
    def num_outer_steps(self) -> int:
        return len(self.outer_steps)

    @property
    def outer_bytes(self) -> int:
        return sum(one.num_bytes for one in self.outer_steps)

    @property
    def outer_s(self) -> float:
        return sum(one.seconds for one in self.outer_steps)
