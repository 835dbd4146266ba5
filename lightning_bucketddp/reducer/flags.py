"""The spare elements at the end of the last bucket, which travel with the gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Flags:
    """Views of those elements.

    Attributes:
        elements: all of them.
        used: one per parameter of the module (Note: used-flags, in `reductions`).
        verdict: all others (Note: verdict, in `nonfinite`); the next three are parts of it.
        of_buckets: one per bucket.
        of_losses: one per rank.
        of_gradients: one per rank.
    """

    elements: Tensor
    used: Tensor
    verdict: Tensor
    of_buckets: Tensor
    of_losses: Tensor
    of_gradients: Tensor

    @staticmethod
    def count(*, num_params: int, num_buckets: int, num_ranks: int) -> int:
        """How many elements there are."""
        return num_params + num_buckets + 2 * num_ranks

    @classmethod
    def over(cls, elements: Tensor, *, num_params: int, num_buckets: int) -> Flags:
        """The meaning of `elements`, of which there are `count`."""
        verdict = elements[num_params:]
        of_buckets, of_ranks = verdict[:num_buckets], verdict[num_buckets:]
        num_ranks = of_ranks.numel() // 2
        used = elements[:num_params]
        return cls(elements, used, verdict, of_buckets, of_ranks[:num_ranks], of_ranks[num_ranks:])
