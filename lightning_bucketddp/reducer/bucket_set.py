"""The buckets of one plan, with their buffers, for one set of trainable parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import MIB, ReducerConfig
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec
from lightning_bucketddp.reducer.bucket import Bucket, BufferedBucket, BufferLayout, InPlaceBucket, SparseBucket
from lightning_bucketddp.wording import pluralize

# Where memory is taken and given back in each step.
_GIVE_BACK_ON = ("cuda",)


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
    """Plans and makes buckets of which each rank keeps a shard (`sharding.shards.Shards`)."""

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
        config: ReducerConfig,
    ) -> list[BucketSpec]: ...
    def make_bucket(self, params: Sequence[Any], **options: Any) -> Bucket: ...


@dataclass(kw_only=True, eq=False, repr=False)
class BucketSet:
    """The buckets of a plan."""

    plan: Sequence[BucketSpec]  # which parameter goes where, by index into `params`
    params: Sequence[Tensor]  # all of the module, trainable or not
    num_firings: Mapping[int, int]  # how often the hook of a parameter fired in the backward that was observed
    streams: set[torch.cuda.Stream]  # on which they fired
    trainable: Sequence[bool]  # by parameter; sharded buckets may hold others, too
    collectives: Collectives
    config: ReducerConfig
    maker: BucketMaker | None  # makes sharded buckets; None: there are none
    version: int
    last_used: int  # the number of backwards by then
    buckets: list[Bucket] = field(default_factory=list)
    index_of_bucket: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device, may_be_resized = self.collectives.device, self.config.comm_hook is not None
        gives_back = device.type in _GIVE_BACK_ON and not may_be_resized
        for index, spec in enumerate(self.plan):
            members = [self.params[i] for i in spec.members]
            trained = [i for i in spec.members if self.trainable[i]]
            is_last = index == len(self.plan) - 1
            num_flags = len(self.params) + len(self.plan) + 2 * self.collectives.world_size if is_last else 0
            bucket: Bucket
            if spec.sparse:
                bucket = SparseBucket(members[0])
            elif spec.sharded is not None:
                assert self.maker is not None  # it has made the plan
                idle = {place for place, i in enumerate(spec.members) if not self.trainable[i]}
                bucket = self.maker.make_bucket(
                    members, idle=idle, num_flags=num_flags, device=device, gives_back=gives_back
                )
            elif spec.alone:
                bucket = InPlaceBucket(members[0])
            else:
                bucket = BufferedBucket(
                    members,
                    num_flags=num_flags,
                    device=device,
                    may_be_resized=may_be_resized,
                    layout=BufferLayout.of(members, alignment=self.config.alignment),
                    gives_back=gives_back,
                )
            bucket.arrivals.expected = sum(max(self.num_firings.get(i, 0), 1) for i in trained)
            self.buckets.append(bucket)
            self.index_of_bucket.update(dict.fromkeys(trained, index))
        self._flags = self._new_flags()
        for bucket in self.buckets:
            if isinstance(bucket, BufferedBucket):
                bucket.count_uses()

    @property
    def flags(self) -> Flags:
        """The flags in the last bucket, which may have taken other memory."""
        if self._flags.elements is not self.buckets[-1].flags:  # type: ignore[union-attr]
            self._flags = self._new_flags()
        return self._flags

    def _new_flags(self) -> Flags:
        last = self.buckets[-1]
        assert isinstance(last, BufferedBucket)  # `plan_buckets` never puts a sparse one last
        return Flags(last.flags, num_params=len(self.params), num_buckets=len(self.plan))

    def give_back(self) -> None:
        """Free memory without gradients (Note: memory between steps)."""
        if len(self.streams) > 1:
            return  # one of them may still be reading what the allocator would give to another
        for bucket in self.buckets:
            if isinstance(bucket, BufferedBucket):
                bucket.give_back()

    @torch.no_grad()
    def take_gradients(self, factor: float) -> None:
        """Collect averaged gradients that parameters were given outside of a backward, multiplied by `factor`."""
        for bucket in self.buckets:
            bucket.collect()
            if factor != 1:
                bucket.numbers.mul_(factor)
            bucket.release()

    def __str__(self) -> str:
        sizes = ["sparse" if isinstance(one, SparseBucket) else f"{one.num_bytes / MIB:.2f}" for one in self.buckets]
        buckets = pluralize(len(sizes), "bucket")
        return f"{len(self.index_of_bucket)} parameter tensors in {buckets} ({', '.join(sizes)} MiB)"
