"""Planning buckets: which parameter goes into which bucket. Pure: no tensors, no communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_bucketddp.config import BucketCaps

# A bucket of this size can be reduced at the end of a backward without being noticed.
_MAY_BE_LAST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What the plan needs to know of a parameter.

    Attributes:
        name: its name.
        num_bytes: the size of its gradient.
        kind: what a bucket's members must share (dtype and device).
        sparse: its gradient is sparse.
        alone: its gradient is large enough to travel alone, from where it is.
    """

    name: str
    num_bytes: int
    kind: str
    sparse: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """The parameters of one bucket, by index, in the order in which their gradients arrive.

    A bucket without members is legal: it carries the used-flags when no other bucket can.
    """

    members: tuple[int, ...]
    sparse: bool = False
    alone: bool = False


@dataclass(slots=True)
class _OpenBucket:
    members: list[int] = field(default_factory=list)
    num_bytes: int = 0


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
    buckets = _by_last_arrival(_fill(specs, dense, caps), dense)
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
    dense = [*buckets, *_by_last_arrival(_fill(specs, dense_missing, caps), dense_missing)]
    sparse = [BucketSpec((i,), sparse=True) for i in (*arrived, *missing) if specs[i].sparse]
    plan = [BucketSpec(tuple(members), alone=specs[members[0]].alone) for members in dense] + sparse
    return _with_room_for_flags(plan, specs)


def has_choice(plan: Sequence[BucketSpec]) -> bool:
    """Return whether other sizes of buckets would make another plan."""
    return sum(_has_buffer(bucket) for bucket in plan) > 1


def _fill(specs: Sequence[ParameterSpec], order: Sequence[int], caps: BucketCaps) -> list[list[int]]:
    """Fill buckets of one kind each, in order; a bucket is closed by the parameter that no longer fits."""
    full: list[list[int]] = []
    num_full_by_kind: dict[str, int] = {}
    open_by_kind: dict[str, _OpenBucket] = {}
    for i in order:
        if specs[i].alone:
            full.append([i])
            continue
        kind, num_bytes = specs[i].kind, specs[i].num_bytes
        bucket = open_by_kind.setdefault(kind, _OpenBucket())
        num_full = num_full_by_kind.get(kind, 0)
        if bucket.members and bucket.num_bytes + num_bytes > caps.at(num_full):
            full.append(bucket.members)
            num_full_by_kind[kind] = num_full + 1
            bucket = open_by_kind[kind] = _OpenBucket()
        bucket.members.append(i)
        bucket.num_bytes += num_bytes
    return full + [bucket.members for bucket in open_by_kind.values()]


def _by_last_arrival(buckets: list[list[int]], order: Sequence[int]) -> list[list[int]]:
    position = {i: n for n, i in enumerate(order)}
    return sorted(buckets, key=lambda members: position[members[-1]])


def _split_tail(specs: Sequence[ParameterSpec], members: list[int], tail_bytes: int) -> list[list[int]]:
    """Cut a last bucket of at most `tail_bytes` off `members`: what leaves last is hidden by nothing."""
    first_of_tail = len(members) - 1
    num_bytes = specs[members[first_of_tail]].num_bytes
    while first_of_tail > 0 and num_bytes + specs[members[first_of_tail - 1]].num_bytes <= tail_bytes:
        first_of_tail -= 1
        num_bytes += specs[members[first_of_tail]].num_bytes
    head, tail = members[:first_of_tail], members[first_of_tail:]
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
