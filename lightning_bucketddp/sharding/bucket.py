"""Buckets of which each rank keeps a shard: of the averaged gradients, and of the weights to step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bucketddp.planning.plan import Sharding
from lightning_bucketddp.reducer.bucket import BufferedBucket, BufferLayout, InPlaceBucket
from lightning_bucketddp.reducer.observer import BackwardObserver
from lightning_bucketddp.sharding.gradient import GlobalNorms, ShardedGradient, ShardingState, is_divided, refuse


class ShardedParameter:
    """A parameter, and which of its elements each rank steps.

    A bucket is cut into equal slices, one per rank. What lies in this rank's slice of a parameter is its *shard*: a
    parameter of one dimension over the same memory, whose gradient is the same range of the bucket. An optimizer that
    works element by element steps the shards, and has their state only. For others a rank owns all of a bucket.
    """

    def __init__(self, name: str, param: nn.Parameter, ranges: Sequence[tuple[int, int]], *, rank: int) -> None:
        self.name = name
        self.param = param
        self.ranges = ranges  # by rank, in memory order
        self.own = start, stop = ranges[rank]
        self._address, self._strides = param.data_ptr(), param.stride()
        self.weights = self.cut(param.detach())  # the memory of `shard`, in its order
        # The parameter itself if this rank owns all of it; None: it owns nothing.
        self.shard: nn.Parameter | None = None
        if stop - start == param.numel():
            self.shard = param
        elif stop > start:
            self.shard = nn.Parameter(self.weights, requires_grad=param.requires_grad)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a tensor that is laid out as the parameter is."""
        start, stop = self.own
        return flat(whole)[start:stop]

    def follow_param(self) -> None:
        """Move the shard to the parameter's memory, which `module.to` or `assign=True` may have replaced."""
        if self.param.stride() != self._strides:
            raise RuntimeError(
                f"The memory format of `{self.name}` has changed from strides {self._strides} to {self.param.stride()}"
                " since its first step: its optimizer state is divided among the ranks (`shard_optimizer`) in the order"
                " of before. Change it before training begins, in `__init__` or `configure_model`, or set"
                " `shard_optimizer=False`."
            )
        if self.param.data_ptr() != self._address:
            self._address = self.param.data_ptr()
            self.weights = self.cut(self.param.detach())
            if self.shard is not None and self.shard is not self.param:
                self.shard.data = self.weights


def flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


@dataclass(slots=True, eq=False)
class ShardedLayout:
    """Parameters that share a bucket for good: their optimizer state lies where they do."""

    members: list[ShardedParameter]
    buffer: BufferLayout
    sharding: Sharding
    alone: bool
    bucket: ShardedBucket | None = None  # which has their gradients now; each plan has a bucket of its own


class ShardedBucket:
    """What both kinds of buckets below do: keep a shard of each gradient, and exchange weights.

    `gradients` are this rank's shards.
    """

    layout: ShardedLayout
    members: Sequence[ShardedParameter]  # those of `layout` that the module still has
    state: ShardingState
    # Each returns one tensor of real numbers: the averaged gradients, and the weights.
    _gradients_to_gather: Callable[[], Tensor]
    weights_to_gather: Callable[[], Tensor]
    # Called when the weights of all ranks have arrived.
    take_weights: Callable[[], None]

    def divided_gradients(self) -> list[ShardedGradient]:
        """Return the divided gradients of all members; refuse those of an earlier backward, which are overwritten."""
        divided = [grad for member in self.layout.members if is_divided(grad := member.param.grad)]
        for one in divided:
            if one.state is not self.state:
                refuse(one, "grad = (a gradient of an earlier backward)")
        return divided

    def gather_gradients(self) -> None:
        """Give all ranks the averaged gradients: a backward is about to add to them, as without sharding."""
        norms, owner = self.state.norms, self.layout.sharding.owner
        norms.collectives.start_gather_of_shards(self._gradients_to_gather(), owner=owner).wait()
        self.state.is_divided = False
        norms.forget()

    def _divide_gradients(self) -> None:
        """End a backward: from now on the gradients are divided."""
        self.state.is_divided = True
        self.state.norms.forget()
        self.layout.bucket = self


def exchange_weights(buckets: Sequence[ShardedBucket], observer: BackwardObserver) -> None:
    """Give all ranks the weights that each has stepped."""
    transfers = []
    for bucket in buckets:
        weights, collectives = bucket.weights_to_gather(), bucket.state.norms.collectives
        transfers.append(collectives.start_gather_of_shards(weights, owner=bucket.layout.sharding.owner))
        observer.gather_started(bucket, transfers[-1], weights.nbytes)
    for bucket, transfer in zip(buckets, transfers, strict=True):
        observer.gather_awaited(bucket)
        transfer.wait()
        bucket.take_weights()
        observer.gather_ended(bucket)


class ShardedBufferedBucket(ShardedBucket, BufferedBucket):
    """Dense gradients side by side in one buffer, through which the weights travel back.

    `idle` are the positions of members that are not trained at the moment.
    """

    def __init__(
        self,
        layout: ShardedLayout,
        members: Sequence[ShardedParameter],
        norms: GlobalNorms,
        *,
        idle: Collection[int],
        **options: Any,
    ) -> None:
        self.layout, self.members = layout, members
        self.sharding = layout.sharding
        self.state = ShardingState(norms)
        self._idle = idle
        offset_of = dict(zip(layout.members, layout.buffer.offsets, strict=True))
        buffer = BufferLayout([offset_of[member] for member in members], layout.buffer.numel)
        super().__init__([member.param for member in members], layout=buffer, **options)
        self._own_slice = slice(*layout.sharding.bounds(self.numbers.numel())[norms.collectives.rank])

    def _allocate(self) -> None:
        super()._allocate()
        self._own = [view.own for view in self.views if isinstance(view, ShardedGradient)]
        self._kept_gradients = self.numbers[:0]  # while weights are in their place

    @property
    def gradients(self) -> list[Tensor]:
        return self._own

    def _view(self, buffer: Tensor, position: int) -> Tensor:
        member, offset = self.members[position], self._offsets[position]
        own = buffer[offset + member.own[0] : offset + member.own[1]]
        return ShardedGradient.over(super()._view(buffer, position), own=own, state=self.state, name=member.name)

    def collect(self) -> list[int]:
        # Idle members are not averaged: they keep their gradients, in memory of their own, because the base class
        # counts references to the views.
        idle_gradients = {}
        for position in self._idle:
            gradient, self.params[position].grad = self.params[position].grad, None
            is_view = isinstance(gradient, ShardedGradient)
            idle_gradients[position] = gradient.plain().clone() if is_view else gradient  # type: ignore[union-attr]
            del gradient
        with torch._C.DisableTorchFunctionSubclass():
            missing = super().collect()
        for position, kept in idle_gradients.items():
            self.params[position].grad = kept
        # A new state: gradients of earlier backwards, which the user has kept, stay divided.
        self.state = ShardingState(self.state.norms)
        for view in self.views:
            view.state = self.state  # type: ignore[attr-defined]
        if idle := [position for position in missing if position in self._idle]:
            self.zero(idle)  # weights have travelled there
        return [position for position in missing if position not in self._idle]

    def zero(self, positions: Sequence[int]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            super().zero(positions)

    def release(self) -> None:
        self._divide_gradients()

    def _gradients_to_gather(self) -> Tensor:
        return self.numbers

    def weights_to_gather(self) -> Tensor:
        # The gradients stay until the user sets them to None, as without sharding.
        self._kept_gradients = self.numbers[self._own_slice].clone()
        places = [place for place, member in enumerate(self.members) if member.shard is not None]
        if places:
            torch._foreach_copy_([self._own[n] for n in places], [self.members[n].weights for n in places])
        return self.numbers

    def take_weights(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            torch._foreach_copy_([param.detach() for param in self.params], self.views)
        self.numbers[self._own_slice].copy_(self._kept_gradients)
        self._kept_gradients = self.numbers[:0]


class ShardedInPlaceBucket(ShardedBucket, InPlaceBucket):
    """The large gradient of one parameter, whose weights are exchanged in the memory of the parameter."""

    def __init__(self, layout: ShardedLayout, norms: GlobalNorms) -> None:
        self.layout, self.members = layout, layout.members
        self.sharding = layout.sharding
        self.state = ShardingState(norms)
        super().__init__(layout.members[0].param)

    @property
    def gradients(self) -> list[Tensor]:
        # Not kept: it would hold the memory of a gradient that is gone.
        gradient = self.params[0].grad
        return [gradient.own if isinstance(gradient, ShardedGradient) else torch.empty(0)]

    def collect(self) -> list[int]:
        self.state = ShardingState(self.state.norms)
        return super().collect()

    def attach(self, position: int) -> None:
        gradient = self._new() if self._gradient is None else self._gradient
        [member] = self.members
        with torch._C.DisableTorchFunctionSubclass():
            own = member.cut(gradient.detach())
            self.params[0].grad = ShardedGradient.over(gradient, own=own, state=self.state, name=member.name)

    def release(self) -> None:
        if self.params[0].grad is not None:
            self.attach(0)
        self._divide_gradients()
        super().release()

    def _gradients_to_gather(self) -> Tensor:
        gradient = self.params[0].grad
        assert isinstance(gradient, ShardedGradient)  # or it is not divided
        return _as_reals(gradient.plain())

    def weights_to_gather(self) -> Tensor:
        return _as_reals(self.params[0].detach())

    def take_weights(self) -> None:
        pass  # they have arrived where they belong


def _as_reals(tensor: Tensor) -> Tensor:
    numbers = flat(tensor)
    return torch.view_as_real(numbers).view(-1) if numbers.is_complex() else numbers
