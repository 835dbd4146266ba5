"""Which parameters are divided among the ranks (`shard_optimizer`), and in which buckets.

Note: layouts stay
    Which rank has which piece is decided when a plan is first made with a parameter, at the end of a backward, and
    stays: other plans, of other sets of trainable parameters, keep the bucket together. So state never moves between
    ranks. What an optimizer has by then, from a checkpoint or because it begins with something, is cut.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import MIB, BucketCaps
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec, Sharding, balance, merge_plans, plan_buckets
from lightning_bucketddp.reducer.bucket import Arrivals, BufferLayout, gradient_strides
from lightning_bucketddp.reducer.observer import BackwardObserver
from lightning_bucketddp.sharding.bucket import (
    Gathering,
    Shard,
    ShardedBufferedBucket,
    ShardedInPlaceBucket,
    ShardedLayout,
)
from lightning_bucketddp.sharding.elementwise import divides_by_elements
from lightning_bucketddp.sharding.gradient import NormsOfAll, ShardedGradient
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
        self._norms = NormsOfAll(collectives, self._divided_gradients)

    def add(self, optimizer: Optimizer) -> None:
        """Divide the state of `optimizer` from now on; raise a ValueError if that cannot give the same numbers."""
        is_elementwise = divides_by_elements(optimizer, whole_parameters=self._whole_parameters)
        gathering = Gathering(self._collectives, self._norms)
        self.optimizers.append(ShardedOptimizer(optimizer, gathering, is_elementwise=is_elementwise))

    def forget(self, params: Collection[Tensor]) -> None:
        """Divide `params`, of a module that is set up again, for other optimizers than before."""
        for known in [known for known in self.optimizers if not set(known.params).isdisjoint(params)]:
            if known.shards:
                raise ValueError(
                    f"A module is set up again whose `{type(known.optimizer).__name__}` has its state divided among the"
                    " ranks (`shard_optimizer`). Set it up once, or load a checkpoint into a new one."
                )
            known.close()
            self.optimizers.remove(known)

    def of(self, optimizer: Any) -> ShardedOptimizer | None:
        """Return what divides the state of `optimizer`, which may be wrapped by Lightning."""
        inner = [optimizer, getattr(optimizer, "_optimizer", None), getattr(optimizer, "optimizer", None)]
        return next((known for known in self.optimizers if any(known.optimizer is one for one in inner)), None)

    def divides(self, param: Tensor) -> bool:
        return param in self._layout_of

    def observe(self, observer: BackwardObserver) -> None:
        for known in self.optimizers:
            known.gathering.observer = observer

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
        """Return whether no exchange of weights is under way."""
        return all(known.gathering.has_exchanged for known in self.optimizers)

    @property
    def is_partial(self) -> bool:
        """Return whether a step has failed, or its exchange of weights: they are not those of one step."""
        return any(known.gathering.is_partial for known in self.optimizers)

    def release_gradients(self) -> None:
        """Leave ordinary gradients behind; those that are divided belong to a step that does not come any more."""
        for known in self.optimizers:
            for param in known.shards:
                if isinstance(gradient := param.grad, ShardedGradient):
                    param.grad = None if gradient.division.is_divided else gradient.plain()

    def follow_params(self) -> None:
        """Have all pieces lie in their parameters' memory, which may be another by now."""
        for known in self.optimizers:
            for shard in known.shards.values():
                shard.follow_param()

    def begin_backward(self) -> None:
        """Have all ranks all of the gradients that a backward adds to: some were averaged and not stepped."""
        for known in self.optimizers:
            known.begin_backward()

    def _divided_gradients(self) -> list[ShardedGradient]:
        buckets = [bucket for known in self.optimizers for bucket in known.gathering.buckets.values()]
        return [gradient for bucket in buckets for gradient in bucket.divided_gradients()]

    def full_gradient(self, param: nn.Parameter) -> Tensor | None:
        """Return all of the averaged gradient of `param`. All ranks must call this."""
        gradient = param.grad
        if not (isinstance(gradient, ShardedGradient) and gradient.division.is_divided):
            return gradient
        full = torch.empty_strided(param.shape, gradient_strides(param), dtype=param.dtype, device=param.device).zero_()
        self._optimizer_of[param].shards[param].cut(full).copy_(gradient.own)
        self._collectives.sum(torch.view_as_real(full) if full.is_complex() else full)
        return full

    def make_bucket(
        self, params: Sequence[Any], arrivals: Arrivals, **options: Any
    ) -> ShardedBufferedBucket | ShardedInPlaceBucket:
        """Make the bucket of these parameters, which have one layout; `options` are for one with a buffer."""
        layout, known = self._layout_of[params[0]], self._optimizer_of[params[0]]
        bucket: ShardedBufferedBucket | ShardedInPlaceBucket
        if layout.alone:
            bucket = ShardedInPlaceBucket(layout, known.gathering, arrivals)
        else:
            shards = [known.shards[param] for param in params]
            bucket = ShardedBufferedBucket(layout, shards, known.gathering, arrivals=arrivals, **options)
        known.gathering.buckets[layout] = bucket
        return bucket

    def plan(
        self,
        specs: Sequence[ParameterSpec],
        params: Sequence[nn.Parameter],
        *,
        arrived: Sequence[int],
        missing: Sequence[int],
        caps: BucketCaps,
        alignment: int,
    ) -> list[BucketSpec]:
        """Plan as `plan_buckets` does; buckets that are divided already stay together (Note: layouts stay).

        In a buffer gradients begin at a multiple of `alignment` elements.
        """
        self._find_owners()
        known = self._known_buckets(params, trained={params[i] for i in (*arrived, *missing)})
        # The optimizer that divides a parameter, which shares buckets only with others of it; None: all ranks step it.
        dividers: list[ShardedOptimizer | None] = []
        marked: list[ParameterSpec] = []
        for spec, param in zip(specs, params, strict=True):
            is_dense = gradient_strides(param) == param.stride() and param.numel() > 0
            divider = self._optimizer_of.get(param) if is_dense and not spec.sparse else None
            dividers.append(divider)
            marked.append(spec if divider is None else self._mark(spec, param, divider))
        # By whole parameters: a rank owns all of a bucket.
        is_owned = [divider is not None and not divider.is_elementwise for divider in dividers]
        num_owned_bytes = sum(spec.num_bytes for spec, owned in zip(specs, is_owned, strict=True) if owned)
        even = max(num_owned_bytes // (_BUCKETS_PER_OWNER * self._collectives.world_size), _SMALLEST_OWNED_BYTES)
        caps_of_owned = BucketCaps(tuple(min(cap, even) for cap in caps.by_position), last=caps.last)
        new: list[BucketSpec] = []
        for owned, caps_of_these in ((False, caps), (True, caps_of_owned)):
            these = {i for i, param in enumerate(params) if param not in self._layout_of and is_owned[i] == owned}
            plan = plan_buckets(
                marked,
                arrived=[i for i in arrived if i in these],
                missing=[i for i in missing if i in these],
                caps=caps_of_these,
            )
            new += [bucket for bucket in plan if bucket.members]
        new = self._divide(new, specs, dividers)
        for bucket in new:
            if bucket.sharded is not None:
                divider = dividers[bucket.members[0]]
                assert divider is not None
                self._settle(bucket, [(specs[i].name, params[i]) for i in bucket.members], divider, alignment=alignment)
        return merge_plans(known, new, specs, arrived=arrived)

    def _find_owners(self) -> None:
        self._optimizer_of.clear()
        for known in self.optimizers:
            for param in known.params:
                owner = self._optimizer_of.setdefault(param, known)
                if param in self._layout_of and param not in known.shards:
                    raise ValueError(
                        f"A parameter of shape {tuple(param.shape)} has gone from one optimizer to another, a"
                        f" `{type(known.optimizer).__name__}`: its state is divided among the ranks and cannot follow."
                        " Keep it where it is, or set `shard_optimizer=False`."
                    )
                if owner is not known:
                    raise ValueError(
                        f"A parameter of shape {tuple(param.shape)} belongs to two optimizers,"
                        f" `{type(owner.optimizer).__name__}` and `{type(known.optimizer).__name__}`: its state cannot"
                        " be divided. Give each parameter to one optimizer, or set `shard_optimizer=False`."
                    )

    def _known_buckets(self, params: Sequence[nn.Parameter], *, trained: set[nn.Parameter]) -> list[BucketSpec]:
        """Return the buckets that are divided already, with those members that the module still has."""
        index_of = {param: index for index, param in enumerate(params)}
        layouts = dict.fromkeys(self._layout_of[param] for param in params if param in self._layout_of)
        return [
            BucketSpec(
                tuple(index_of[shard.param] for shard in layout.shards if shard.param in index_of),
                alone=layout.alone,
                sharded=layout.shares,
            )
            for layout in layouts
            if any(shard.param in trained for shard in layout.shards)
        ]

    def _mark(self, spec: ParameterSpec, param: nn.Parameter, divider: ShardedOptimizer) -> ParameterSpec:
        num_reals = param.numel() * (2 if param.is_complex() else 1)
        has_equal_slices = not divider.is_elementwise or num_reals % self._collectives.world_size == 0
        kind = f"{spec.kind} optimizer {self.optimizers.index(divider)}"
        return replace(spec, kind=kind, alone=spec.alone and has_equal_slices)

    def _divide(
        self, plan: Sequence[BucketSpec], specs: Sequence[ParameterSpec], dividers: Sequence[ShardedOptimizer | None]
    ) -> list[BucketSpec]:
        """Decide how each new bucket is divided: into slices, or by giving each to the rank that has least."""
        num_ranks = self._collectives.world_size
        divider_of = [dividers[bucket.members[0]] for bucket in plan]
        divided = [
            bucket if divider is None else replace(bucket, sharded=Sharding(num_ranks))
            for bucket, divider in zip(plan, divider_of, strict=True)
        ]
        for known in self.optimizers:
            if not known.is_elementwise:
                places = [place for place, divider in enumerate(divider_of) if divider is known]
                sizes = [sum(specs[i].num_bytes for i in plan[place].members) for place in places]
                for place, owner in zip(places, balance(sizes, known.loads), strict=True):
                    divided[place] = replace(plan[place], sharded=Sharding(num_ranks, owner=owner))
        return divided

    def _settle(
        self,
        bucket: BucketSpec,
        members: Sequence[tuple[str, nn.Parameter]],
        divider: ShardedOptimizer,
        *,
        alignment: int,
    ) -> None:
        """Decide for good which rank has which piece of the members of a bucket."""
        assert bucket.sharded is not None
        params = [param for _, param in members]
        buffer = BufferLayout([0], params[0].numel())
        if not bucket.alone:
            buffer = BufferLayout.of(params, bucket.sharded, alignment=alignment)
        shards = []
        for (name, param), offset in zip(members, buffer.offsets, strict=True):
            ranges = bucket.sharded.ranges(offset, param.numel(), of=buffer.numel)
            shards.append(Shard(name, param, ranges, rank=self._collectives.rank))
        layout = ShardedLayout(shards, buffer, bucket.sharded, bucket.alone)
        self._layout_of.update(dict.fromkeys(params, layout))
        divider.adopt(shards)
