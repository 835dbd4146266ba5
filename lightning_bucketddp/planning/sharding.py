"""What `shard_optimizer` makes of a plan: how buckets are divided, and how much optimizer state each rank has. Pure.

The state of an optimizer is counted as tensors of the size and dtype of each parameter: two for Adam and AdamW, one for
SGD with momentum. The number of steps, which some optimizers keep in a tensor of one element, is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.planning.backward_profile import Profile
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec, plan_buckets
from lightning_bucketddp.planning.shares import Shares

# Of Adam and AdamW: the means of gradients and of their squares.
STATE_TENSORS = 2
# Where a rank's share of a bucket may begin.
_ALIGN_BYTES = 64


def sharded_plan(profile: Profile, config: ReducerConfig, *, num_ranks: int) -> list[BucketSpec]:
    """Return the plan of an optimizer that works element by element: each rank has a slice of each dense bucket.

    It is the one that is made of the first backward: another one would move state between ranks.
    """
    specs = [replace(spec, alone=spec.alone and _has_equal_slices(spec, num_ranks)) for spec in profile.specs]
    plan = plan_buckets(specs, arrived=profile.arrived, missing=profile.missing, caps=config.caps)
    shares = Shares(num_ranks)
    return [bucket if bucket.sparse or not bucket.members else replace(bucket, sharded=shares) for bucket in plan]


def _has_equal_slices(spec: ParameterSpec, num_ranks: int) -> bool:
    dtype: torch.dtype = getattr(torch, spec.kind.split()[0].removeprefix("torch."))
    return spec.num_bytes // dtype.to_real().itemsize % num_ranks == 0


@dataclass(frozen=True, slots=True)
class StateByRank:
    """The optimizer state of a plan.

    Attributes:
        divided_bytes: by rank, what it has of the state that is divided.
        whole_bytes: what every rank has: that of parameters whose gradients are sparse.
    """

    divided_bytes: Sequence[int]
    whole_bytes: int

    @property
    def unsharded_bytes(self) -> int:
        """Return what every rank would have without sharding."""
        return sum(self.divided_bytes) + self.whole_bytes

    @property
    def most_bytes(self) -> int:
        """Return what the rank has that has most."""
        return max(self.divided_bytes) + self.whole_bytes


def state_by_rank(
    specs: Sequence[ParameterSpec],
    plan: Sequence[BucketSpec],
    *,
    num_ranks: int,
    tensors_per_parameter: int = STATE_TENSORS,
) -> StateByRank:
    """Return how the state of an optimizer of all parameters in `plan` is divided."""
    divided = [0] * num_ranks
    whole = 0
    for bucket in plan:
        num_bytes = tensors_per_parameter * sum(specs[i].num_bytes for i in bucket.members)
        if bucket.sharded is None:
            whole += num_bytes
            continue
        padded = bucket.sharded.padded(num_bytes, align=tensors_per_parameter * _ALIGN_BYTES)
        for rank, (start, stop) in enumerate(bucket.sharded.ranges(0, num_bytes, of=padded)):
            divided[rank] += stop - start
    return StateByRank(divided, whole)
