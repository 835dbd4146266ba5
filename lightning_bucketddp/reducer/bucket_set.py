"""The buckets of one plan, with their buffers, for one set of trainable parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_bucketddp.config import BucketCaps
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec
from lightning_bucketddp.reducer.bucket import Arrivals, Bucket, BufferedBucket, BufferLayout
from lightning_bucketddp.reducer.lone_bucket import InPlaceBucket, SparseBucket

# Where memory is taken and given back in each step. Not all versions of torch can tell who else uses it.
_GIVE_BACK_ON = ("cuda",) if hasattr(torch._C, "_storage_Use_Count") else ()


@dataclass(frozen=True, slots=True)
class Flags:
    """The spare elements at the end of the last bucket, which travel with the gradients.

    Attributes:
        elements: all of them.
        used: one per parameter of the module (Note: used-flags, in `launch_queue`).
        digests: all others (Note: digests, in `nonfinite`); the next three are parts of them.
        of_buckets: one per bucket.
        of_losses: one per rank.
        of_gradients: one per rank.
    """

    elements: Tensor
    used: Tensor
    digests: Tensor
    of_buckets: Tensor
    of_losses: Tensor
    of_gradients: Tensor

    @staticmethod
    def count(*, num_params: int, num_buckets: int, num_ranks: int) -> int:
        """Return how many elements there are."""
        return num_params + num_buckets + 2 * num_ranks

    @classmethod
    def over(cls, elements: Tensor, *, num_params: int, num_buckets: int) -> Flags:
        """Give meaning to `elements`, of which there are `count`."""
        digests = elements[num_params:]
        of_buckets, of_ranks = digests[:num_buckets], digests[num_buckets:]
        num_ranks = of_ranks.numel() // 2
        used = elements[:num_params]
        return cls(elements, used, digests, of_buckets, of_ranks[:num_ranks], of_ranks[num_ranks:])


class BucketMaker(Protocol):
    """Plans and makes buckets in the reducer's place: those whose gradients the ranks divide."""

    @property
    def have_arrived(self) -> bool:
        """Whether nothing that it exchanges is under way."""

    def begin_backward(self) -> None:
        """Get ready for gradients."""

    def plan(
        self,
        specs: Sequence[ParameterSpec],
        params: Sequence[Any],
        *,
        arrived: Sequence[int],
        missing: Sequence[int],
        caps: BucketCaps,
        alignment: int,
    ) -> list[BucketSpec]:
        """Plan as `plan_buckets` does; in a buffer gradients begin at a multiple of `alignment` elements."""

    def make_bucket(
        self, params: Sequence[Any], *, arrivals: Arrivals, num_flags: int, device: torch.device, gives_back: bool
    ) -> Bucket:
        """Make the bucket of these parameters, as it was planned."""


class BucketSet:
    """The buckets of a plan.

    Args:
        plan: which parameter goes where, by index into `params`.
        params: all parameters of the module, trainable or not.
        num_firings: how often the hook of a parameter fired in the backward that was observed.
        num_ranks: how many ranks say something of themselves in the flags.
        trainable: by parameter; buckets of which each rank keeps a share may hold others, too.
        maker: makes such buckets; None: there are none.
        may_be_resized: a communication hook may resize the buffers.
        alignment: the multiple, in elements, at which a gradient begins.
    """

    def __init__(
        self,
        plan: Sequence[BucketSpec],
        *,
        params: Sequence[Tensor],
        num_firings: Mapping[int, int],
        device: torch.device,
        num_ranks: int,
        trainable: Sequence[bool],
        maker: BucketMaker | None = None,
        may_be_resized: bool = False,
        alignment: int = 1,
    ) -> None:
        self.plan = plan
        self.num_firings = num_firings
        self.buckets: list[Bucket] = []
        self.index_of_bucket: dict[int, int] = {}
        self.streams: set[torch.cuda.Stream] = set()
        self.last_used = 0
        self.version = 0
        for index, spec in enumerate(plan):
            members = [params[i] for i in spec.members]
            trained = [i for i in spec.members if trainable[i]]
            arrivals = Arrivals(sum(max(num_firings.get(i, 0), 1) for i in trained))
            is_last = index == len(plan) - 1
            num_flags = (
                Flags.count(num_params=len(params), num_buckets=len(plan), num_ranks=num_ranks) if is_last else 0
            )
            gives_back = device.type in _GIVE_BACK_ON and not may_be_resized
            bucket: Bucket
            if spec.sparse:
                bucket = SparseBucket(members[0], arrivals=arrivals)
            elif spec.sharded is not None:
                assert maker is not None  # who makes such plans
                bucket = maker.make_bucket(
                    members, arrivals=arrivals, num_flags=num_flags, device=device, gives_back=gives_back
                )
            elif spec.alone:
                bucket = InPlaceBucket(members[0], arrivals=arrivals)
            else:
                bucket = BufferedBucket(
                    members,
                    arrivals=arrivals,
                    num_flags=num_flags,
                    device=device,
                    may_be_resized=may_be_resized,
                    layout=BufferLayout.of(members, alignment=alignment),
                    gives_back=gives_back,
                )
            self.buckets.append(bucket)
            self.index_of_bucket.update(dict.fromkeys(trained, index))
        last = self.buckets[-1]
        assert isinstance(last, BufferedBucket)  # `plan_buckets` never puts a sparse one last
        self.flags = Flags.over(last.flags, num_params=len(params), num_buckets=len(plan))
        for bucket in self.buckets:
            if isinstance(bucket, BufferedBucket):
                bucket.count_uses()

    def scale(self, factor: float) -> None:
        """Multiply all gradients by `factor`."""
        for bucket in self.buckets:
            bucket.scale(factor)

    def release(self) -> None:
        """End a backward: see that parameters have the reduced gradients, and keep no others."""
        for bucket in self.buckets:
            bucket.release()

    def give_back(self) -> None:
        """Let go of memory that no gradient is in."""
        if len(self.streams) > 1:
            return  # one of them may still be reading what the allocator would give to another
        for bucket in self.buckets:
            bucket.give_back()

    def clear(self) -> None:
        """Make all gradients zero."""
        for bucket in self.buckets:
            bucket.clear()

    def __str__(self) -> str:
        sizes = [bucket.describe_size() for bucket in self.buckets]
        buckets = "1 bucket" if len(sizes) == 1 else f"{len(sizes)} buckets"
        return f"{len(self.index_of_bucket)} parameter tensors in {buckets} ({', '.join(sizes)} MiB)"
