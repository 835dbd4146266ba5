"""Buckets of which each rank keeps a share: its part of the averaged gradients, and of the weights to step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bucketddp.comm.collectives import Collectives, Pending
from lightning_bucketddp.planning.plan import Sharding
from lightning_bucketddp.reducer.bucket import Arrivals, BufferedBucket, BufferLayout, InPlaceBucket
from lightning_bucketddp.reducer.observer import NO_OBSERVER, BackwardObserver, is_being_captured
from lightning_bucketddp.sharding.gradient import NormsOfAll, ShardedGradient, ShardingState, refuse


class Shard:
    """A parameter, and which of its elements each rank steps.

    A bucket is cut into equal slices, one per rank. What lies in this rank's slice of a parameter is a *piece*: a
    parameter of one dimension over the same memory, whose gradient is the same range of the bucket. An optimizer that
    works element by element steps the pieces, and has their state only. For others a rank owns all of a bucket.
    """

    def __init__(self, name: str, param: nn.Parameter, ranges: Sequence[tuple[int, int]], *, rank: int) -> None:
        self.name = name
        self.param = param
        self.ranges = ranges  # by rank, in memory order
        self.own = start, stop = ranges[rank]
        self._address, self._strides = param.data_ptr(), param.stride()
        self.weights = self.cut(param.detach())  # the memory of `piece`, in its order
        # What is stepped here: the parameter itself, if this rank owns it whole; None: nothing of it.
        self.piece: nn.Parameter | None = None
        if stop - start == param.numel():
            self.piece = param
        elif stop > start:
            self.piece = nn.Parameter(self.weights, requires_grad=param.requires_grad)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor that is laid out as the parameter is."""
        start, stop = self.own
        return flat(whole)[start:stop]

    def follow_param(self) -> None:
        """Have the piece lie in the parameter's memory, which may be another by now (`module.to`, `assign=True`)."""
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
            if self.piece is not None and self.piece is not self.param:
                self.piece.data = self.weights


def flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


@dataclass(slots=True, eq=False)
class ShardedLayout:
    """Parameters that share a bucket for good: their state lies where they do."""

    shards: list[Shard]
    buffer: BufferLayout
    shares: Sharding
    alone: bool


@dataclass(slots=True, eq=False)
class Gathering:
    """What the buckets of an optimizer have in common."""

    collectives: Collectives
    norms: NormsOfAll
    # In which the gradients of each layout are now.
    buckets: dict[ShardedLayout, ShardedBucket] = field(default_factory=dict)
    # A step has begun and not ended, or failed: the weights are not those of one step.
    is_partial: bool = False
    observer: BackwardObserver = NO_OBSERVER  # another one is set while steps are recorded
    _exchanged: Any = None

    @property
    def has_exchanged(self) -> bool:
        """Whether the weights of the last step have arrived on the device, too."""
        return not self.is_partial and (self._exchanged is None or bool(self._exchanged.query()))

    def exchange_weights(self) -> None:
        """Give all ranks the weights that each has stepped."""
        # On all ranks the same buckets in the same order: after an averaged backward they have the same gradients.
        stepped = [
            bucket for bucket in self.buckets.values() if any(shard.param.grad is not None for shard in bucket.shards)
        ]
        with torch.no_grad():
            transfers = [bucket.start_gather() for bucket in stepped]
            for bucket, transfer in zip(stepped, transfers, strict=True):
                bucket.finish_gather(transfer)
        self.norms.forget()  # some optimizers change gradients
        self.is_partial = False
        device = self.collectives.device
        if device.type == "cuda" and not is_being_captured(device):
            self._exchanged = self._exchanged or torch.Event(device)
            self._exchanged.record()


class ShardedBucket:
    """What both kinds of buckets below do: keep a share of gradients, and exchange weights.

    Their `gradients` are this rank's part of each gradient.
    """

    layout: ShardedLayout
    shards: Sequence[Shard]
    gathering: Gathering
    division: ShardingState
    # The gradients, as real numbers in one tensor.
    _averaged: Callable[[], Tensor]
    # The weights, likewise; and what is done when those of all ranks are there.
    _weights_to_gather: Callable[[], Tensor]
    _take_weights: Callable[[], None]

    def divided_gradients(self) -> list[ShardedGradient]:
        """Return the gradients of members that are divided; refuse one of an earlier backward: what it was is gone."""
        gradients = [shard.param.grad for shard in self.layout.shards]
        divided = [one for one in gradients if isinstance(one, ShardedGradient) and one.division.is_divided]
        for one in divided:
            if one.division is not self.division:
                refuse(one, "grad = (a gradient of an earlier backward)")
        return divided

    def _keep_share(self) -> None:
        """End a backward: from now on the gradients are divided."""
        self.division.is_divided = True
        self.gathering.norms.forget()
        self.gathering.buckets[self.layout] = self

    def gather_gradients(self) -> None:
        """Give all ranks the gradients that each has averaged: a backward is to add to them, as without sharding."""
        averaged = self._averaged()
        self.gathering.collectives.start_gather_of_shards(averaged, owner=self.layout.shares.owner).wait()
        self.division.is_divided = False
        self.gathering.norms.forget()

    def start_gather(self) -> Pending:
        weights = self._weights_to_gather()
        transfer = self.gathering.collectives.start_gather_of_shards(weights, owner=self.layout.shares.owner)
        self.gathering.observer.gather_started(self, transfer, weights.nbytes)
        return transfer

    def finish_gather(self, transfer: Pending) -> None:
        """Wait for the weights, and write them to where the parameters are."""
        self.gathering.observer.gather_awaited(self)
        transfer.wait()
        self._take_weights()
        self.gathering.observer.gather_ended(self)


class ShardedBufferedBucket(ShardedBucket, BufferedBucket):
    """Dense gradients side by side in one buffer, through which the weights travel back.

    `shards` are those members of `layout` that the module still has, and `idle` the positions of those among them that
    are not trained at the moment.
    """

    def __init__(
        self,
        layout: ShardedLayout,
        shards: Sequence[Shard],
        gathering: Gathering,
        *,
        idle: Collection[int],
        **options: Any,
    ) -> None:
        self.layout, self.shards, self.gathering = layout, shards, gathering
        self.shares = layout.shares
        self.division = ShardingState(gathering.collectives, gathering.norms)
        self._idle = idle
        offset_of = dict(zip(layout.shards, layout.buffer.offsets, strict=True))
        buffer = BufferLayout([offset_of[shard] for shard in shards], layout.buffer.numel)
        super().__init__([shard.param for shard in shards], layout=buffer, **options)
        self._own = [view.own for view in self.views if isinstance(view, ShardedGradient)]
        self._share = slice(*layout.shares.bounds(self.numbers.numel())[gathering.collectives.rank])
        self._share_of_gradients = self.numbers[:0]

    @property
    def gradients(self) -> list[Tensor]:
        return self._own

    def _view(self, buffer: Tensor, position: int) -> Tensor:
        shard, offset = self.shards[position], self._offsets[position]
        own = buffer[offset + shard.own[0] : offset + shard.own[1]]
        return ShardedGradient.over(super()._view(buffer, position), own=own, division=self.division, name=shard.name)

    def collect(self) -> list[int]:
        # What is not trained is not averaged, either: its gradient stays what it is.
        idle_gradients = {position: self._take_out(position) for position in self._idle}
        with torch._C.DisableTorchFunctionSubclass():
            missing = super().collect()
        for position, gradient in idle_gradients.items():
            self.params[position].grad = gradient
        # Another one: gradients of before, which somebody has kept, stay divided.
        self.division = ShardingState(self.gathering.collectives, self.gathering.norms)
        for view in self.views:
            view.division = self.division  # type: ignore[attr-defined]
        if idle := [position for position in missing if position in self._idle]:
            self.zero(idle)  # weights have travelled there
        return [position for position in missing if position not in self._idle] if idle else missing

    def _take_out(self, position: int) -> Tensor | None:
        """Take the gradient from a member; return it, in memory of its own: `collect` counts references to views."""
        gradient, self.params[position].grad = self.params[position].grad, None
        return gradient.plain().clone() if isinstance(gradient, ShardedGradient) else gradient

    def zero(self, positions: Sequence[int]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            super().zero(positions)

    def release(self) -> None:
        self._keep_share()

    def _averaged(self) -> Tensor:
        return self.numbers

    def _weights_to_gather(self) -> Tensor:
        # The gradients stay, as without sharding: until somebody sets them to None.
        self._share_of_gradients = self.numbers[self._share].clone()
        places = [place for place, shard in enumerate(self.shards) if shard.piece is not None]
        if places:
            torch._foreach_copy_([self._own[n] for n in places], [self.shards[n].weights for n in places])
        return self.numbers

    def _take_weights(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            torch._foreach_copy_([param.detach() for param in self.params], self.views)
        self.numbers[self._share].copy_(self._share_of_gradients)
        self._share_of_gradients = self.numbers[:0]


def _as_reals(tensor: Tensor) -> Tensor:
    numbers = flat(tensor)
    return torch.view_as_real(numbers).view(-1) if numbers.is_complex() else numbers


class ShardedInPlaceBucket(ShardedBucket, InPlaceBucket):
    """The large gradient of one parameter, whose weights travel back from where they are to where they belong."""

    def __init__(self, layout: ShardedLayout, gathering: Gathering, arrivals: Arrivals) -> None:
        self.layout, self.shards, self.gathering = layout, layout.shards, gathering
        self.shares = layout.shares
        self.division = ShardingState(gathering.collectives, gathering.norms)
        super().__init__(layout.shards[0].param, arrivals=arrivals)

    @property
    def gradients(self) -> list[Tensor]:
        # Not kept: it would hold the memory of a gradient that is gone.
        gradient = self.params[0].grad
        return [gradient.own if isinstance(gradient, ShardedGradient) else torch.empty(0)]

    def collect(self) -> list[int]:
        self.division = ShardingState(self.gathering.collectives, self.gathering.norms)
        return super().collect()

    def attach(self, position: int) -> None:
        gradient = self._new() if self._gradient is None else self._gradient
        with torch._C.DisableTorchFunctionSubclass():
            own = self.shards[0].cut(gradient.detach())
            self.params[0].grad = ShardedGradient.over(
                gradient, own=own, division=self.division, name=self.shards[0].name
            )

    def release(self) -> None:
        if self.params[0].grad is not None:
            self.attach(0)
        self._keep_share()
        super().release()

    def _averaged(self) -> Tensor:
        gradient = self.params[0].grad
        assert isinstance(gradient, ShardedGradient)  # or it is not divided
        return _as_reals(gradient.plain())

    def _weights_to_gather(self) -> Tensor:
        return _as_reals(self.params[0].detach())

    def _take_weights(self) -> None:
        pass  # they have come to where they belong
