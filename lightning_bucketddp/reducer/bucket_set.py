"""The buckets of one plan, with their buffers, for one set of trainable parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bucketddp.config import MIB
from lightning_bucketddp.planning.plan import BucketSpec
from lightning_bucketddp.reducer.bucket import Arrivals, Bucket, LoneBucket, SparseBucket


@dataclass(frozen=True, slots=True)
class Flags:
    """Views of those elements.

    Attributes:
        elements: all of them.
        used: one per parameter of the module (Note: used-flags, in `launch_queue`).
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


AnyBucket = Bucket | LoneBucket | SparseBucket


class BucketSet:
    """The buckets of a plan.

    Args:
        plan: which parameter goes where, by index into `params`.
        params: all parameters of the module, trainable or not.
        num_firings: how often the hook of a parameter fired in the backward that was observed.
        device: where the buffers live.
        num_ranks: how many ranks say something of themselves in the flags.
        may_be_resized: a communication hook may resize the buffers.
    """

    def __init__(
        self,
        plan: Sequence[BucketSpec],
        *,
        params: Sequence[Tensor],
        num_firings: Mapping[int, int],
        device: torch.device,
        num_ranks: int,
        may_be_resized: bool = False,
    ) -> None:
        self.plan = plan
        self.num_firings = num_firings
        self.buckets: list[AnyBucket] = []
        self.index_of_bucket: dict[int, int] = {}
        self.streams: set[torch.cuda.Stream] = set()
        self.last_used = 0
        self.version = 0
        for index, spec in enumerate(plan):
            members = [params[i] for i in spec.members]
            arrivals = Arrivals(sum(max(num_firings.get(i, 0), 1) for i in spec.members))
            if spec.sparse:
                self.buckets.append(SparseBucket(members[0], arrivals=arrivals))
            elif spec.alone:
                self.buckets.append(LoneBucket(members[0], arrivals=arrivals))
            else:
                num_flags = Flags.count(num_params=len(params), num_buckets=len(plan), num_ranks=num_ranks)
                self.buckets.append(
                    Bucket(
                        members,
                        arrivals=arrivals,
                        num_flags=num_flags if index == len(plan) - 1 else 0,
                        device=device,
                        may_be_resized=may_be_resized,
                    )
                )
            self.index_of_bucket.update(dict.fromkeys(spec.members, index))
        last = self.buckets[-1]
        assert isinstance(last, Bucket)  # `plan_buckets` never puts a sparse one last
        self.flags = Flags.over(last.flags, num_params=len(params), num_buckets=len(plan))
        self.lone_buckets = [bucket for bucket in self.buckets if isinstance(bucket, LoneBucket)]
        self.sparse_buckets = [bucket for bucket in self.buckets if isinstance(bucket, SparseBucket)]

    def scale(self, factor: float) -> None:
        """Multiply all gradients by `factor`."""
        in_buffers = [bucket.buffer for bucket in self.buckets if isinstance(bucket, Bucket)]
        torch._foreach_mul_(in_buffers + [bucket.wire for bucket in self.lone_buckets], factor)
        for bucket in self.sparse_buckets:
            bucket.gradient = bucket.gradient * factor

    def zero(self) -> None:
        """Make all gradients zero."""
        in_buffers = [bucket.wire for bucket in self.buckets if isinstance(bucket, Bucket)]
        torch._foreach_zero_(in_buffers + [grad for bucket in self.lone_buckets for grad in bucket.gradients])
        for bucket in self.sparse_buckets:
            bucket.zero([0])
            if bucket.params[0].grad is not None:
                bucket.attach(0)

    def __str__(self) -> str:
        sizes = ["sparse" if isinstance(b, SparseBucket) else f"{b.num_bytes / MIB:.2f}" for b in self.buckets]
        buckets = "1 bucket" if len(sizes) == 1 else f"{len(sizes)} buckets"
        return f"{len(self.index_of_bucket)} parameter tensors in {buckets} ({', '.join(sizes)} MiB)"
