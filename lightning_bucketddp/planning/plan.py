"""Planning buckets: which parameter goes into which bucket. Pure: no tensors, no communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_bucketddp.config import BucketCaps
from lightning_bucketddp.planning.shares import Shares

# A bucket of this size can be reduced at the end of a backward without being noticed.
_MAY_BE_LAST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What the plan needs to know of a parameter and its gradient."""

    name: str
    num_bytes: int
    kind: str  # what a bucket's members must share (dtype and device)
    sparse: bool = False
    alone: bool = False  # large enough to travel alone, from where it is


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """The parameters of one bucket, by index, in the order in which their gradients arrive.

    A bucket without members is legal: it carries the used-flags when no other bucket can. One that is `sharded` may
    have members that are not trained at the moment.
    """

    members: tuple[int, ...]
    sparse: bool = False
    alone: bool = False
    sharded: Shares | None = None


def plan_buckets(
    specs: Sequence[ParameterSpec], *, arrived: Sequence[int], missing: Sequence[int], caps: BucketCaps
) -> list[BucketSpec]:
    """Place parameters into buckets and put the buckets in the order in which they can leave.

    Args:
        specs: every parameter that `arrived` and `missing` index.
        arrived: parameters whose gradients were seen, in order of arrival.
        missing: parameters that got no gradient. They get buckets of their own and come last: their gradients may never
            arrive, and a bucket waits for all its members.
        caps: the sizes wanted.
    """
    dense = [i for i in arrived if not specs[i].sparse]
    buckets = _fill(specs, dense, caps)
    if caps.last is not None and buckets and len(buckets[-1]) > 1:
        buckets[-1:] = _split_tail(specs, buckets[-1], caps.last)
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
    dense_missing = [i for i in missing if not specs[i].sparse]
    dense = [*buckets, *_fill(specs, dense_missing, caps)]
    sparse = [BucketSpec((i,), sparse=True) for i in (*arrived, *missing) if specs[i].sparse]
    plan = [BucketSpec(tuple(members), alone=specs[members[0]].alone) for members in dense] + sparse
    return _with_room_for_flags(plan, specs)


def merge_plans(
    known: Sequence[BucketSpec], plan: Sequence[BucketSpec], specs: Sequence[ParameterSpec], *, arrived: Sequence[int]
) -> list[BucketSpec]:
    """Return one plan of the buckets of both, in the order in which they can leave."""
    position = {i: n for n, i in enumerate(arrived)}

    def leaves_at(bucket: BucketSpec) -> tuple[bool, int]:
        return bucket.sparse, max((position.get(i, len(position)) for i in bucket.members), default=len(position))

    return _with_room_for_flags(sorted([*known, *plan], key=leaves_at), specs)


def has_choice(plan: Sequence[BucketSpec]) -> bool:
    """Return whether other sizes of buckets would make another plan."""
    return sum(_has_buffer(bucket) for bucket in plan) > 1


def _fill(specs: Sequence[ParameterSpec], order: Sequence[int], caps: BucketCaps) -> list[list[int]]:
    """Fill buckets of one kind each, in order; a bucket is closed by the parameter that no longer fits.

    They are returned in the order in which their last members come.
    """
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


def _split_tail(specs: Sequence[ParameterSpec], members: list[int], tail_bytes: int) -> list[list[int]]:
    """Cut a last bucket of at most `tail_bytes` off `members`: what leaves last is hidden by nothing."""
    bytes_from_the_end = accumulate(specs[i].num_bytes for i in reversed(members))
    num_in_tail = max(sum(num_bytes <= tail_bytes for num_bytes in bytes_from_the_end), 1)
    head, tail = members[:-num_in_tail], members[-num_in_tail:]
    return [head, tail] if head else [tail]


def _with_room_for_flags(plan: list[BucketSpec], specs: Sequence[ParameterSpec]) -> list[BucketSpec]:
    """Put a bucket with a buffer last: what is only known then, which parameters were used, travels in it."""
    if plan and _has_buffer(plan[-1]):
        return plan
    small = [
        bucket
        for bucket in plan
        if _has_buffer(bucket) and sum(specs[i].num_bytes for i in bucket.members) <= _MAY_BE_LAST_BYTES
    ]
    if not small:
        return [*plan, BucketSpec(())]
    return [bucket for bucket in plan if bucket is not small[-1]] + small[-1:]


def _has_buffer(bucket: BucketSpec) -> bool:
    return not (bucket.sparse or bucket.alone)
