"""Which parameters are divided among the ranks (`shard_optimizer`), and in which buckets.

Note: layouts stay
    Which rank has which shard is decided when a plan is first made with a parameter, at the end of a backward, and
    stays: other plans, of other sets of trainable parameters, keep the bucket together. So state never moves between
    ranks. What an optimizer has by then, from a checkpoint or because it begins with something, is cut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import MIB, BucketCaps, ReducerConfig
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec, Sharding, balance, merge_plans, plan_buckets
from lightning_bucketddp.reducer.bucket import BufferLayout, gradient_strides
from lightning_bucketddp.reducer.observer import BackwardObserver
from lightning_bucketddp.sharding.bucket import (
    ShardedBufferedBucket,
    ShardedInPlaceBucket,
    ShardedLayout,
    ShardedParameter,
)
from lightning_bucketddp.sharding.elementwise import divides_by_elements
from lightning_bucketddp.sharding.gradient import GlobalNorms, ShardedGradient, is_divided
from lightning_bucketddp.sharding.optimizer import ShardedOptimizer

ShardOption = bool | Literal["parameters"]

# Where ranks own whole buckets: so many per rank that they are about equal, unless that makes them very small.
_BUCKETS_PER_OWNER = 16
_SMALLEST_OWNED_BYTES = MIB


class Shards:
    """All optimizers of a run whose state is divided, and the buckets of their parameters (Note: layouts stay)."""

    def __init__(self, collectives: Collectives, *, whole_parameters: bool) -> None:
        self.optimizers: list[ShardedOptimizer] = []
        self._collectives = collectives
        self._whole_parameters = whole_parameters
        self._layout_of: dict[nn.Parameter, ShardedLayout] = {}
        self._optimizer_of: dict[nn.Parameter, ShardedOptimizer] = {}
        self._norms = GlobalNorms(
            collectives,
            lambda: [
                one for known in self.optimizers for bucket in known.buckets for one in bucket.divided_gradients()
            ],
        )

    def add(self, optimizer: Optimizer) -> None:
        """Divide the state of `optimizer` from now on; raise a ValueError if that cannot give the same numbers."""
        is_elementwise = divides_by_elements(optimizer, whole_parameters=self._whole_parameters)
        self.optimizers.append(ShardedOptimizer(optimizer, self._norms, is_elementwise=is_elementwise))
        try:
            self._find_optimizers()
        except ValueError:
            self.optimizers.pop().close()
            raise

    def forget(self, params: Collection[Tensor]) -> None:
        """Forget the optimizers of `params`, whose module is set up again."""
        for known in [known for known in self.optimizers if not set(known.params).isdisjoint(params)]:
            if known.members:
                raise ValueError(
                    f"A module is set up again whose `{type(known.optimizer).__name__}` has its state divided among the"
                    " ranks (`shard_optimizer`). Set it up once, or load a checkpoint into a new one."
                )
            known.close()
            self.optimizers.remove(known)

    def of(self, optimizer: Any) -> ShardedOptimizer | None:
        """Return what divides the state of `optimizer`, which may be wrapped by Lightning."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        return next((known for known in self.optimizers if known.optimizer is inner), None)

    def divides(self, param: Tensor) -> bool:
        return param in self._layout_of

    def observe(self, observer: BackwardObserver) -> None:
        for known in self.optimizers:
            known.observer = observer

    def close(self) -> None:
        for known in self.optimizers:
            known.close()
        self.optimizers.clear()

    def describe(self) -> str:
        return (
            f"optimizer state divided among {self._collectives.world_size} ranks: {self.state_bytes / MIB:.1f} MiB here"
            f" instead of {self.whole_state_bytes / MIB:.1f} MiB"
        )

    @property
    def state_bytes(self) -> int:
        return sum(known.state_bytes for known in self.optimizers)

    @property
    def whole_state_bytes(self) -> int:
        return sum(known.whole_state_bytes for known in self.optimizers)

    @property
    def have_arrived(self) -> bool:
        """Whether no exchange of weights is in flight."""
        return all(known.has_exchanged for known in self.optimizers)

    @property
    def is_partial(self) -> bool:
        """Whether a step, or its exchange of weights, has failed: the weights are not those of one step."""
        return any(known.is_partial for known in self.optimizers)

    def release_gradients(self) -> None:
        """Leave ordinary gradients behind; those that are divided belong to a step that does not come any more."""
        for known in self.optimizers:
            for param in known.members:
                if isinstance(gradient := param.grad, ShardedGradient):
                    param.grad = None if is_divided(gradient) else gradient.plain()

    def follow_params(self) -> None:
        """Move all shards to their parameters' memory, which may be another by now."""
        for known in self.optimizers:
            for member in known.members.values():
                member.follow_param()

    def begin_backward(self) -> None:
        """Make gradients whole again where a backward adds to them: some were averaged and not stepped."""
        for known in self.optimizers:
            known.begin_backward()

    def full_gradient(self, param: nn.Parameter) -> Tensor | None:
        """Return all of the averaged gradient of `param`. All ranks must call this."""
        gradient = param.grad
        if not is_divided(gradient):
            return gradient
        full = torch.empty_strided(param.shape, gradient_strides(param), dtype=param.dtype, device=param.device).zero_()
        self._optimizer_of[param].members[param].cut(full).copy_(gradient.own)
        self._collectives.sum(torch.view_as_real(full) if full.is_complex() else full)
        return full

    def make_bucket(self, params: Sequence[Any], **options: Any) -> ShardedBufferedBucket | ShardedInPlaceBucket:
        """Make the bucket of these parameters, which have one layout; `options` are for one with a buffer."""
        layout, known = self._layout_of[params[0]], self._optimizer_of[params[0]]
        bucket: ShardedBufferedBucket | ShardedInPlaceBucket
        if layout.alone:
            bucket = ShardedInPlaceBucket(layout, self._norms)
        else:
            members = [known.members[param] for param in params]
            bucket = ShardedBufferedBucket(layout, members, self._norms, **options)
        if layout.bucket is None:
            known.layouts.append(layout)  # in the order of the plan
        layout.bucket = bucket
        return bucket

    def plan(
        self,
        specs: Sequence[ParameterSpec],
        params: Sequence[nn.Parameter],
        *,
        arrived: Sequence[int],
        missing: Sequence[int],
        config: ReducerConfig,
    ) -> list[BucketSpec]:
        """Plan as `plan_buckets` does; buckets that are divided already stay together (Note: layouts stay)."""
        self._find_optimizers()
        # By index: the optimizer of a parameter that is divided, or will be. The others are stepped by all ranks.
        sharded = {
            i: self._optimizer_of[param]
            for i, param in enumerate(params)
            if param in self._optimizer_of
            and not specs[i].sparse
            and param.numel() > 0
            and gradient_strides(param) == param.stride()
        }
        marked = [self._mark(spec, params[i], sharded[i]) if i in sharded else spec for i, spec in enumerate(specs)]
        # Of these a rank owns all of a bucket.
        owned = {i for i, optimizer in sharded.items() if not optimizer.is_elementwise}
        num_buckets = _BUCKETS_PER_OWNER * self._collectives.world_size
        even = max(sum(specs[i].num_bytes for i in owned) // num_buckets, _SMALLEST_OWNED_BYTES)
        caps_of_owned = BucketCaps(tuple(min(cap, even) for cap in config.caps.by_position), last=config.caps.last)
        new: list[BucketSpec] = []
        unplanned = {i for i, param in enumerate(params) if param not in self._layout_of}
        for these, caps_of_these in ((unplanned - owned, config.caps), (unplanned & owned, caps_of_owned)):
            plan = plan_buckets(
                marked,
                arrived=[i for i in arrived if i in these],
                missing=[i for i in missing if i in these],
                caps=caps_of_these,
            )
            new += [bucket for bucket in plan if bucket.members]
        known = self._known_buckets(params, trained={params[i] for i in (*arrived, *missing)})
        new = self._divide(new, specs, sharded)
        for bucket in new:
            if bucket.sharded is not None:
                self._settle(bucket, bucket.sharded, specs, params, alignment=config.alignment)
        return merge_plans(known, new, specs, arrived=arrived)

    def _find_optimizers(self) -> None:
        self._optimizer_of.clear()
        for known in self.optimizers:
            for param in known.params:
                first = self._optimizer_of.setdefault(param, known)
                if first is not known:
                    raise ValueError(
                        f"A parameter of shape {tuple(param.shape)} belongs to two optimizers,"
                        f" `{type(first.optimizer).__name__}` and `{type(known.optimizer).__name__}`: its state cannot"
                        " be divided. Give each parameter to one optimizer, or set `shard_optimizer=False`."
                    )
                if param in self._layout_of and param not in known.members:
                    raise ValueError(
                        f"A parameter of shape {tuple(param.shape)} has gone from one optimizer to another, a"
                        f" `{type(known.optimizer).__name__}`: its state is divided among the ranks and cannot follow."
                        " Keep it where it is, or set `shard_optimizer=False`."
                    )

    def _known_buckets(self, params: Sequence[nn.Parameter], *, trained: set[nn.Parameter]) -> list[BucketSpec]:
        """Return the buckets that are divided already, with those members that the module still has."""
        index_of = {param: index for index, param in enumerate(params)}
        layouts = dict.fromkeys(self._layout_of[param] for param in params if param in self._layout_of)
        return [
            BucketSpec(
                tuple(index_of[member.param] for member in layout.members if member.param in index_of),
                alone=layout.alone,
                sharded=layout.sharding,
            )
            for layout in layouts
            if any(member.param in trained for member in layout.members)
        ]

    def _mark(self, spec: ParameterSpec, param: nn.Parameter, optimizer: ShardedOptimizer) -> ParameterSpec:
        """Return the spec of a parameter that shares buckets only with others of `optimizer`."""
        num_reals = param.numel() * (2 if param.is_complex() else 1)
        has_equal_slices = not optimizer.is_elementwise or num_reals % self._collectives.world_size == 0
        kind = f"{spec.kind} optimizer {self.optimizers.index(optimizer)}"
        return replace(spec, kind=kind, alone=spec.alone and has_equal_slices)

    def _divide(
        self, plan: Sequence[BucketSpec], specs: Sequence[ParameterSpec], sharded: Mapping[int, ShardedOptimizer]
    ) -> list[BucketSpec]:
        """Decide how each new bucket is divided: into slices, or by giving each to the rank that has least."""
        num_ranks = self._collectives.world_size
        divided = [
            replace(bucket, sharded=Sharding(num_ranks)) if bucket.members[0] in sharded else bucket for bucket in plan
        ]
        for known in self.optimizers:
            if not known.is_elementwise:
                places = [place for place, bucket in enumerate(plan) if sharded.get(bucket.members[0]) is known]
                sizes = [sum(specs[i].num_bytes for i in plan[place].members) for place in places]
                for place, owner in zip(places, balance(sizes, known.loads), strict=True):
                    divided[place] = replace(plan[place], sharded=Sharding(num_ranks, owner=owner))
        return divided

    def _settle(
        self,
        bucket: BucketSpec,
        sharding: Sharding,
        specs: Sequence[ParameterSpec],
        params: Sequence[nn.Parameter],
        *,
        alignment: int,
    ) -> None:
        """Decide for good which rank has which shard of the members of a bucket."""
        in_bucket = [params[i] for i in bucket.members]
        buffer = BufferLayout([0], in_bucket[0].numel())
        if not bucket.alone:
            buffer = BufferLayout.of(in_bucket, sharding, alignment=alignment)
        members = []
        for i, offset in zip(bucket.members, buffer.offsets, strict=True):
            ranges = sharding.ranges(offset, params[i].numel(), of=buffer.numel)
            members.append(ShardedParameter(specs[i].name, params[i], ranges, rank=self._collectives.rank))
        layout = ShardedLayout(members, buffer, sharding, bucket.alone)
        self._layout_of.update(dict.fromkeys(in_bucket, layout))
        self._optimizer_of[in_bucket[0]].adopt(members)
