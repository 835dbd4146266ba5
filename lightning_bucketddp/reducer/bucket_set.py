"""The buckets of one plan, with their buffers, for one set of trainable parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import MIB, BucketCaps, ReducerConfig
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec
from lightning_bucketddp.reducer.bucket import (
    Arrivals,
    Bucket,
    BufferedBucket,
    BufferLayout,
    InPlaceBucket,
    SparseBucket,
)
from lightning_bucketddp.wording import pluralize

# Where memory is taken and given back in each step. Not all versions of torch can tell who else uses it.
_GIVE_BACK_ON = ("cuda",) if hasattr(torch._C, "_storage_Use_Count") else ()


class Flags:
    """The spare elements at the end of the last bucket, which travel with the gradients."""

    def __init__(self, elements: Tensor, *, num_params: int, num_buckets: int) -> None:
        self.elements = elements
        # One per parameter of the module (Note: used-flags, in `launch_queue`).
        self.used = elements[:num_params]
        # One per bucket, one per rank of its loss, and one per rank of its gradients (Note: digests, in `nonfinite`).
        self.digests = elements[num_params:]
        self.of_buckets, of_ranks = self.digests[:num_buckets], self.digests[num_buckets:]
        num_ranks = len(of_ranks) // 2
        self.of_losses, self.of_gradients = of_ranks[:num_ranks], of_ranks[num_ranks:]


class BucketMaker(Protocol):
    """Plans and makes buckets in the reducer's place: those whose gradients the ranks divide (`Shards`)."""

    @property
    def have_arrived(self) -> bool: ...
    def begin_backward(self) -> None: ...
    def plan(
        self,
        specs: Sequence[ParameterSpec],
        params: Sequence[Any],
        *,
        arrived: Sequence[int],
        missing: Sequence[int],
        caps: BucketCaps,
        alignment: int,
    ) -> list[BucketSpec]: ...
    def make_bucket(self, params: Sequence[Any], arrivals: Arrivals, **options: Any) -> Bucket: ...


@dataclass(kw_only=True, eq=False, repr=False)
class BucketSet:
    """The buckets of a plan."""

    plan: Sequence[BucketSpec]  # which parameter goes where, by index into `params`
    params: Sequence[Tensor]  # all of the module, trainable or not
    num_firings: Mapping[int, int]  # how often the hook of a parameter fired in the backward that was observed
    streams: set[torch.cuda.Stream]  # on which they did
    trainable: Sequence[bool]  # by parameter; buckets of which each rank keeps a share may hold others, too
    collectives: Collectives
    config: ReducerConfig
    maker: BucketMaker | None  # makes such buckets; None: there are none
    last_used: int = 0
    version: int = 0
    buckets: list[Bucket] = field(default_factory=list)
    index_of_bucket: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan, params, collectives, maker = self.plan, self.params, self.collectives, self.maker
        device, may_be_resized = collectives.device, self.config.comm_hook is not None
        gives_back = device.type in _GIVE_BACK_ON and not may_be_resized
        for index, spec in enumerate(plan):
            members = [params[i] for i in spec.members]
            trained = [i for i in spec.members if self.trainable[i]]
            arrivals = Arrivals(sum(max(self.num_firings.get(i, 0), 1) for i in trained))
            is_last = index == len(plan) - 1
            num_flags = len(params) + len(plan) + 2 * collectives.world_size if is_last else 0
            bucket: Bucket
            if spec.sparse:
                bucket = SparseBucket(members[0], arrivals=arrivals)
            elif spec.sharded is not None:
                assert maker is not None  # who makes such plans
                idle = {place for place, i in enumerate(spec.members) if not self.trainable[i]}
                bucket = maker.make_bucket(
                    members, arrivals, idle=idle, num_flags=num_flags, device=device, gives_back=gives_back
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
                    layout=BufferLayout.of(members, alignment=self.config.alignment),
                    gives_back=gives_back,
                )
            self.buckets.append(bucket)
            self.index_of_bucket.update(dict.fromkeys(trained, index))
        last = self.buckets[-1]
        assert isinstance(last, BufferedBucket)  # `plan_buckets` never puts a sparse one last
        self.flags = Flags(last.flags, num_params=len(params), num_buckets=len(plan))
        for bucket in self.buckets:
            if isinstance(bucket, BufferedBucket):
                bucket.count_uses()

    def give_back(self) -> None:
        """Let go of memory that no gradient is in (Note: memory between steps)."""
        if len(self.streams) > 1:
            return  # one of them may still be reading what the allocator would give to another
        for bucket in self.buckets:
            if isinstance(bucket, BufferedBucket):
                bucket.give_back()

    @torch.no_grad()
    def take_gradients(self, factor: float) -> None:
        for bucket in self.buckets:
            bucket.collect()
            if factor != 1:
                bucket.numbers.mul_(factor)
            bucket.release()

    def __str__(self) -> str:
        sizes = ["sparse" if isinstance(one, SparseBucket) else f"{one.num_bytes / MIB:.2f}" for one in self.buckets]
        buckets = pluralize(len(sizes), "bucket")
        return f"{len(self.index_of_bucket)} parameter tensors in {buckets} ({', '.join(sizes)} MiB)"
