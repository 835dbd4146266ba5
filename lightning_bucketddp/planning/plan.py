"""Planning buckets: which parameter goes into which bucket. Pure: no tensors, no communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from lightning_bucketddp.config import BucketCaps

# A bucket of this size can be reduced at the end of a backward without being noticed.
_MAY_BE_LAST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter and its gradient, as the plan needs them."""

    name: str
    num_bytes: int
    kind: str  # dtype and device; all members of a bucket have one kind
    sparse: bool = False
    alone: bool = False  # large enough to be reduced alone, without a copy

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype in `kind`; None if there is none."""
        dtype = getattr(torch, self.kind.partition(" ")[0].removeprefix("torch."), None)
        return dtype if isinstance(dtype, torch.dtype) else None


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """The parameters of one bucket, by index, in the order in which their gradients arrive."""

    members: tuple[int, ...]  # empty: the bucket carries the used-flags, because no other bucket can
    sparse: bool = False
    alone: bool = False
    sharded: Sharding | None = None  # if it is, some members may not be trained at the moment


def plan_buckets(
    specs: Sequence[ParameterSpec], *, arrived: Sequence[int], missing: Sequence[int], caps: BucketCaps
) -> list[BucketSpec]:
    """Place parameters into buckets and put the buckets in the order in which they can leave.

    Parameters that `arrived` are in the order of their gradients. Those that are `missing` got no gradient, and get
    buckets of their own, the last ones: a bucket waits for all its members.
    """
    buckets = _fill(specs, [i for i in arrived if not specs[i].sparse], caps)
    if caps.last is not None and buckets:
        # A small last bucket: nothing hides its reduction.
        members = buckets[-1]
        bytes_from_the_end = accumulate(specs[i].num_bytes for i in reversed(members))
        num_in_tail = max(sum(num_bytes <= caps.last for num_bytes in bytes_from_the_end), 1)
        head, tail = members[:-num_in_tail], members[-num_in_tail:]
        buckets[-1:] = [head, tail] if head else [tail]
    return complete_plan(specs, buckets, arrived=arrived, missing=missing, caps=caps)


def complete_plan(
    specs: Sequence[ParameterSpec],
    buckets: Sequence[Sequence[int]],
    *,
    arrived: Sequence[int],
    missing: Sequence[int],
    caps: BucketCaps,
) -> list[BucketSpec]:
    """Return the plan that begins with these `buckets` of dense gradients that arrived; see `plan_buckets`."""
    dense = [*buckets, *_fill(specs, [i for i in missing if not specs[i].sparse], caps)]
    sparse = [BucketSpec((i,), sparse=True) for i in (*arrived, *missing) if specs[i].sparse]
    plan = [BucketSpec(tuple(members), alone=specs[members[0]].alone) for members in dense] + sparse
    return _with_room_for_flags(plan, specs)


def merge_plans(
    known: Sequence[BucketSpec], plan: Sequence[BucketSpec], specs: Sequence[ParameterSpec], *, arrived: Sequence[int]
) -> list[BucketSpec]:
    """Return the buckets of two plans, in the order in which the last trained member of each arrives."""
    position = {i: n for n, i in enumerate(arrived)}

    def leaves_at(bucket: BucketSpec) -> tuple[bool, int]:
        return bucket.sparse, max((position.get(i, len(position)) for i in bucket.members), default=len(position))

    return _with_room_for_flags(sorted([*known, *plan], key=leaves_at), specs)


def has_choice(plan: Sequence[BucketSpec]) -> bool:
    """Return whether other bucket sizes would make another plan."""
    return sum(_has_buffer(bucket) for bucket in plan) > 1


def _fill(specs: Sequence[ParameterSpec], order: Sequence[int], caps: BucketCaps) -> list[list[int]]:
    """Return buckets of one kind each, sorted by their last members; a parameter that does not fit closes a bucket."""
    full: list[list[int]] = []
    open_by_kind: dict[str, list[int]] = {}
    num_full, num_bytes = Counter[str](), Counter[str]()
    for i in order:
        kind, size = specs[i].kind, specs[i].num_bytes
        if specs[i].alone:
            full.append([i])
            continue
        if kind in open_by_kind and num_bytes[kind] + size > caps.at(num_full[kind]):
            full.append(open_by_kind.pop(kind))
            num_full[kind] += 1
            num_bytes[kind] = 0
        open_by_kind.setdefault(kind, []).append(i)
        num_bytes[kind] += size
    position = {i: n for n, i in enumerate(order)}
    return sorted([*full, *open_by_kind.values()], key=lambda members: position[members[-1]])


def _with_room_for_flags(plan: list[BucketSpec], specs: Sequence[ParameterSpec]) -> list[BucketSpec]:
    """Put a bucket with a buffer last: it carries the used-flags, which are known only when backward ends."""
    if plan and _has_buffer(plan[-1]):
        return plan
    for bucket in reversed(plan):
        if _has_buffer(bucket) and sum(specs[i].num_bytes for i in bucket.members) <= _MAY_BE_LAST_BYTES:
            return [*(other for other in plan if other is not bucket), bucket]
    return [*plan, BucketSpec(())]


def _has_buffer(bucket: BucketSpec) -> bool:
    return not (bucket.sparse or bucket.alone)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a bucket is divided among ranks: into equal slices, or not at all."""

    num_ranks: int
    owner: int | None = None  # the rank that keeps the whole bucket; None: each rank keeps a slice

    def padded(self, numel: int, *, align: int) -> int:
        """Return how many elements a buffer for `numel` needs, so that each shard begins at a multiple of `align`."""
        unit = align * (self.num_ranks if self.owner is None else 1)
        return -(-numel // unit) * unit

    def bounds(self, numel: int) -> list[tuple[int, int]]:
        """Return by rank where its shard of a bucket of `numel` elements starts and stops."""
        if self.owner is not None:
            return [(0, numel) if rank == self.owner else (0, 0) for rank in range(self.num_ranks)]
        size = numel // self.num_ranks
        return [(rank * size, (rank + 1) * size) for rank in range(self.num_ranks)]

    def ranges(self, offset: int, numel: int, *, of: int) -> list[tuple[int, int]]:
        """Return by rank which elements it keeps of a parameter at `offset` in a bucket of `of` elements."""
        return [
            (min(max(start - offset, 0), numel), min(max(stop - offset, 0), numel)) for start, stop in self.bounds(of)
        ]


def balance(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Return an owner for each of `sizes`: the largest first, to the rank with the least load. Updates `loads`."""
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += sizes[index]
    return owners
