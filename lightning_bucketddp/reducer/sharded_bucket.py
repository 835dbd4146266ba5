"""Buckets of which each rank keeps a share: its part of the averaged gradients, and of the weights to step.

Note: pieces
    A bucket is cut into as many equal slices as there are ranks. What lies in this rank's slice of a parameter is a
    *piece*: a parameter of one dimension over the same memory, whose gradient is the same range of the bucket. An
    optimizer that works element by element steps the pieces, and so the parameters themselves: nothing is copied, and
    its state is that of the share. For other optimizers a rank owns all of a bucket, and its parameters are the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bucketddp.comm.collectives import Collectives, Pending
from lightning_bucketddp.planning.shares import Shares
from lightning_bucketddp.reducer.bucket import Arrivals, BufferedBucket, BufferLayout
from lightning_bucketddp.reducer.graphs import is_being_captured
from lightning_bucketddp.reducer.lone_bucket import InPlaceBucket
from lightning_bucketddp.reducer.observer import NO_OBSERVER, BackwardObserver
from lightning_bucketddp.reducer.sharded_gradient import Division, NormsOfAll, ShardedGradient
from lightning_bucketddp.reducer.weight_gathering import can_arrive_later, mark_gathering, unmark_gathering


class Shard:
    """A parameter, and which of its elements each rank steps.

    Args:
        ranges: by rank, in memory order.
        rank: this one.

    Attributes:
        own: this rank's range.
        piece: what is stepped here; the parameter itself if this rank owns it whole; None: nothing of it.
        weights: the memory of `piece`, in its order.
    """

    def __init__(self, name: str, param: nn.Parameter, ranges: Sequence[tuple[int, int]], *, rank: int) -> None:
        self.name = name
        self.param = param
        self.ranges = ranges
        self.own = start, stop = ranges[rank]
        self._address = param.data_ptr()
        self.weights = self.cut(param.detach())
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
    shares: Shares
    alone: bool


@dataclass(slots=True, eq=False)
class Gathering:
    """What the buckets of an optimizer have in common.

    Attributes:
        norms: of all gradients that are divided.
        needed_at_once: parameters whose new weights cannot be waited for when they are used.
        buckets: in which each layout is now.
        reduced: those whose gradients have been reduced and not stepped.
        aside: gradients from before the backward that runs, this rank's part of each, by parameter.
        pending: buckets whose weights are on their way.
        is_torn: an exchange of weights has failed: they are not those of one step.
        observer: is told of them; another one than this is set while steps are recorded.
    """

    collectives: Collectives
    norms: NormsOfAll
    needed_at_once: set[Tensor]
    buckets: dict[ShardedLayout, ShardedBucket] = field(default_factory=dict)
    reduced: dict[ShardedLayout, ShardedBucket] = field(default_factory=dict)
    aside: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    pending: list[ShardedBucket] = field(default_factory=list)
    is_torn: bool = False
    observer: BackwardObserver = NO_OBSERVER

    def note_other_gradients(self) -> None:
        """See which parameters are to be stepped by gradients that nobody has reduced: the user has set them."""
        for layout, bucket in self.buckets.items():
            if layout not in self.reduced and any(shard.param.grad is not None for shard in layout.shards):
                self.reduced[layout] = bucket


class ShardedBucket:
    """What both kinds of buckets below do: keep a share of gradients, and exchange weights."""

    params: list[Tensor]
    numbers: Any
    attach: Callable[[int], None]
    layout: ShardedLayout
    shards: Sequence[Shard]
    gathering: Gathering
    division: Division
    _transfer: Pending | None = None
    _stream: Any = None
    _is_marked = False

    def own_gradient(self, position: int) -> Tensor:
        """Return this rank's part of the gradient of a member."""
        raise NotImplementedError

    @property
    def gradients(self) -> list[Tensor]:
        """This rank's part of each gradient, by member; none if they are gone."""
        return [self.own_gradient(position) for position in range(len(self.shards))]

    def _keep_share(self, *, publish: bool) -> None:
        """End a backward: from now on the gradients are divided, and those from before are added to them."""
        self.division.is_divided = True
        self.gathering.norms.forget()
        aside = self.gathering.aside
        if aside:
            for position, shard in enumerate(self.shards):
                earlier = aside.pop(shard.param, None)
                if earlier is None:
                    continue
                if publish and shard.param.grad is not None:
                    self.own_gradient(position).add_(earlier)
                else:
                    self.attach(position)
                    self.own_gradient(position).copy_(earlier)
        self.gathering.reduced[self.layout] = self

    def put_aside(self) -> None:
        """Keep this rank's part of the gradients, for a backward that adds to them."""
        for position, shard in enumerate(self.shards):
            if isinstance(shard.param.grad, ShardedGradient):
                self.gathering.aside[shard.param] = self.own_gradient(position).clone()
                shard.param.grad = None

    def start_gather(self) -> None:
        """Start giving all ranks the weights that each has stepped. The gradients are gone then."""
        for shard in self.shards:
            if shard.param.grad is not None:
                shard.param.grad = None
        weights = self._weights_to_gather()
        owner = self.layout.shares.owner
        self._transfer = self.gathering.collectives.start_exchange_of_shares(weights, owner=owner)
        self.gathering.observer.gather_started(self, self._transfer, weights.nbytes)
        device = weights.device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.gathering.pending.append(self)
        can_wait = self.gathering.needed_at_once.isdisjoint(self.params)
        self._is_marked = can_wait and can_arrive_later(self.params, device)
        if self._is_marked:
            mark_gathering(self.params, self.finish_gather)
        else:
            self.finish_gather()

    def finish_gather(self) -> None:
        """Wait for the weights (Note: weights on their way, in `weight_gathering`)."""
        transfer, self._transfer = self._transfer, None
        if self._is_marked:
            unmark_gathering(self.params)
            self._is_marked = False
        if transfer is None:
            return
        self.gathering.pending.remove(self)
        if not self.gathering.collectives.is_open:
            self.gathering.is_torn = True  # whether they have come is not known any more
            return
        self.gathering.observer.gather_awaited(self)
        try:
            with torch.no_grad():
                self._wait(transfer)
        except BaseException:
            self.gathering.is_torn = True
            raise
        self.gathering.observer.gather_ended(self)

    def _wait(self, transfer: Pending) -> None:
        if self._stream is None or self._stream == torch.cuda.current_stream(self._stream.device):
            transfer.wait()
            self._take_weights()
            return
        if is_being_captured(self._stream.device):
            raise RuntimeError(
                f"A graph is captured while the weights of `{self.shards[0].name}` are on their way from other ranks"
                " (`shard_optimizer`): it would not contain them. Warm up on a side stream, as torch advises for"
                " `torch.cuda.graph`: there each step waits for its weights."
            )
        # Where the step was: other streams were told to wait for that one, if at all.
        with torch.cuda.stream(self._stream):
            transfer.wait()
            self._take_weights()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _weights_to_gather(self) -> Tensor:
        raise NotImplementedError

    def _take_weights(self) -> None:
        raise NotImplementedError


class ShardedBufferedBucket(ShardedBucket, BufferedBucket):
    """Dense gradients side by side in one buffer, through which the weights travel back.

    Args:
        shards: those members of `layout` that the module still has.
        idle: positions of members that are not trained at the moment.
    """

    def __init__(
        self,
        layout: ShardedLayout,
        shards: Sequence[Shard],
        *,
        gathering: Gathering,
        arrivals: Arrivals,
        num_flags: int,
        device: torch.device,
        idle: frozenset[int],
    ) -> None:
        self.layout, self.shards, self.gathering = layout, shards, gathering
        self.shares = layout.shares
        self.division = Division(gathering.collectives, gathering.norms)
        self._idle = idle
        offset_of = dict(zip(layout.shards, layout.buffer.offsets, strict=True))
        super().__init__(
            [shard.param for shard in shards],
            arrivals=arrivals,
            num_flags=num_flags,
            device=device,
            layout=BufferLayout([offset_of[shard] for shard in shards], layout.buffer.numel),
        )
        self._own = [view.own for view in self.views if isinstance(view, ShardedGradient)]

    def own_gradient(self, position: int) -> Tensor:
        return self._own[position]

    def _view(self, buffer: Tensor, position: int) -> Tensor:
        shard, offset = self.shards[position], self._offsets[position]
        own = buffer[offset + shard.own[0] : offset + shard.own[1]]
        return ShardedGradient.over(super()._view(buffer, position), own=own, division=self.division, name=shard.name)

    def collect(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            missing = super().collect()
        # Another one: gradients of before, which somebody has kept, stay divided.
        self.division = Division(self.gathering.collectives, self.gathering.norms)
        for view in self.views:
            view.division = self.division  # type: ignore[attr-defined]
        if idle := [position for position in missing if position in self._idle]:
            self.zero(idle)  # weights have travelled there
        return [position for position in missing if position not in self._idle] if idle else missing

    def zero(self, positions: Sequence[int]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            super().zero(positions)

    def release(self, *, publish: bool) -> None:
        self._keep_share(publish=publish)

    def _weights_to_gather(self) -> Tensor:
        places = [place for place, shard in enumerate(self.shards) if shard.piece is not None]
        if places:
            torch._foreach_copy_([self._own[n] for n in places], [self.shards[n].weights for n in places])
        numbers: Tensor = self.numbers
        return numbers

    def _take_weights(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            torch._foreach_copy_([param.detach() for param in self.params], self.views)


class ShardedInPlaceBucket(ShardedBucket, InPlaceBucket):
    """The large gradient of one parameter, whose weights travel back from where they are to where they belong."""

    def __init__(self, layout: ShardedLayout, *, gathering: Gathering, arrivals: Arrivals) -> None:
        self.layout, self.shards, self.gathering = layout, layout.shards, gathering
        self.shares = layout.shares
        self.division = Division(gathering.collectives, gathering.norms)
        self._own_gradient = torch.empty(0)
        super().__init__(layout.shards[0].param, arrivals=arrivals)

    def own_gradient(self, position: int) -> Tensor:
        return self._own_gradient

    def collect(self) -> list[int]:
        self.division = Division(self.gathering.collectives, self.gathering.norms)
        return super().collect()

    def attach(self, position: int) -> None:
        gradient = self._new() if self._gradient is None else self._gradient
        with torch._C.DisableTorchFunctionSubclass():
            self._own_gradient = self.shards[0].cut(gradient.detach())
            self.params[0].grad = ShardedGradient.over(
                gradient, own=self._own_gradient, division=self.division, name=self.shards[0].name
            )

    def release(self, *, publish: bool) -> None:
        if publish and self.params[0].grad is not None:
            self.attach(0)
        self._keep_share(publish=publish)
        super().release(publish=publish)

    def start_gather(self) -> None:
        super().start_gather()
        self._own_gradient = torch.empty(0)

    def _weights_to_gather(self) -> Tensor:
        weights = flat(self.params[0].detach())
        return torch.view_as_real(weights).view(-1) if weights.is_complex() else weights

    def _take_weights(self) -> None:
        pass  # they have come to where they belong
