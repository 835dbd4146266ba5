"""An optimizer that steps this rank's part of its parameters, and has the state of that part only.

While an optimizer steps it has this rank's pieces of its parameters (`bucket.Shard`), and so the state of those.
Whatever else looks at its parameter groups sees parameters: schedulers, clipping, `zero_grad`, `toggle_optimizer`,
callbacks that add a group, hooks around the step. The step ends with an exchange of weights: when it returns, and for
all hooks after it, each rank has all of them, in the memory where they have always been.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bucketddp.checkpoint.rank_state import gather_to_rank_zero
from lightning_bucketddp.reducer.observer import outside_of_graphs
from lightning_bucketddp.sharding.bucket import Gathering, Shard
from lightning_bucketddp.sharding.gradient import ShardedGradient


class ShardedOptimizer:
    """An optimizer that steps this rank's pieces only.

    `is_elementwise`: pieces may be any parts of parameters, otherwise they are whole ones.
    """

    def __init__(self, optimizer: Optimizer, gathering: Gathering, *, is_elementwise: bool) -> None:
        self.optimizer = optimizer
        self.is_elementwise = is_elementwise
        self.gathering = gathering
        self.shards: dict[nn.Parameter, Shard] = {}
        # State from a checkpoint, by position of the parameter, that is cut when the first layout is made.
        self.loaded: dict[int, Any] = {}
        self.loads = [0] * gathering.collectives.world_size
        self._whole: list[list[nn.Parameter]] | None = None
        # Of parameters that this rank owns, while they are stepped: as the optimizer sees them, and as they are.
        self._divided: dict[nn.Parameter, tuple[Tensor, ShardedGradient]] = {}
        self._num_steps_inside = 0
        self._before = optimizer.register_step_pre_hook(outside_of_graphs(self._before_step))
        after = optimizer.register_step_post_hook(outside_of_graphs(self._after_step))
        # The user's hooks, also those registered before, see whole weights.
        hooks = optimizer._optimizer_step_post_hooks
        for number in [number for number in hooks if number != after.id]:
            hooks[number] = hooks.pop(number)
        self._given_step = vars(optimizer).get("step")  # of a scheduler, or compiled
        self._own_step = self._restoring(optimizer.step)
        optimizer.step = self._own_step  # type: ignore[method-assign]
        self._handles = [
            self._before,
            after,
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
            optimizer.register_state_dict_pre_hook(self._before_save),
        ]

    def close(self) -> None:
        """Be an ordinary optimizer again, with this rank's part of the state."""
        self.show_parameters()
        for handle in self._handles:
            handle.remove()
        if self.optimizer.step is self._own_step:  # or somebody has wrapped it, and it does nothing of its own any more
            del self.optimizer.step
            if self._given_step is not None:
                self.optimizer.step = self._given_step  # type: ignore[method-assign]

    def _restoring(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `step` as one after which the optimizer has its parameters, also if it raises."""

        @functools.wraps(getattr(step, "__func__", step))
        def step_and_restore(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            finally:
                self._num_steps_inside = 0
                self.show_parameters()

        return MethodType(step_and_restore, self.optimizer)  # schedulers expect a method

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters, in the order in which a checkpoint counts them."""
        groups = [group["params"] for group in self.optimizer.param_groups] if self._whole is None else self._whole
        return [param for params in groups for param in params]

    @property
    def state_bytes(self) -> int:
        return sum(map(_size_of, self.optimizer.state.values()))

    @property
    def whole_state_bytes(self) -> int:
        """What it would be undivided, estimated from the parameters of which this rank has something."""
        pieces = [shard.piece for shard in self.shards.values() if shard.piece is not None]
        own = sum(piece.nbytes for piece in pieces)
        of_own = sum(_size_of(self.optimizer.state.get(piece, {})) for piece in pieces)
        whole = sum(shard.param.nbytes for shard in self.shards.values())
        return self.state_bytes - of_own + (round(of_own * whole / own) if own else 0)

    def show_shards(self) -> None:
        """Replace `param_groups` by this rank's pieces, with their gradients, for the duration of a step."""
        assert self._whole is None
        params = self.params if self.loaded else []
        for place in [place for place in self.loaded if params[place] not in self.shards]:
            self.optimizer.state[params[place]] = self._on_device(self.loaded.pop(place), params[place])
        for bucket in self.gathering.buckets.values():
            bucket.divided_gradients()  # none is refused
        self._whole = [group["params"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["params"] = [piece for param in group["params"] if (piece := self._piece_of(param)) is not None]
        self.gathering.is_partial = True  # until weights are exchanged

    def show_parameters(self) -> None:
        if self._whole is None:
            return
        for group, params in zip(self.optimizer.param_groups, self._whole, strict=True):
            group["params"] = params
        self._whole = None
        for shard in self.shards.values():
            if shard.piece is not None and shard.piece is not shard.param:
                shard.piece.grad = None
        for param, (plain, gradient) in self._divided.items():
            if param.grad is plain:
                param.grad = gradient
        self._divided.clear()

    def begin_backward(self) -> None:
        """Be an optimizer of parameters whose gradients are whole wherever a backward adds to them."""
        # Hooks that were registered since see parameters, not pieces.
        hooks = self.optimizer._optimizer_step_pre_hooks
        hooks[self._before.id] = hooks.pop(self._before.id)
        for bucket in self.gathering.buckets.values():
            if any(shard.param.requires_grad for shard in bucket.layout.shards) and bucket.divided_gradients():
                bucket.gather_gradients()

    def adopt(self, shards: Sequence[Shard]) -> None:
        """Step these shards from now on; state that is there already is cut."""
        place_of = {param: place for place, param in enumerate(self.params)}
        for shard in shards:
            self.shards[shard.param] = shard
            whole = self.loaded.pop(place_of[shard.param], None) or self.optimizer.state.pop(shard.param, None)
            if whole and shard.piece is not None:
                self.optimizer.state[shard.piece] = self._own_part(whole, shard)

    def _own_part(self, state: Mapping[str, Any], shard: Shard) -> dict[str, Any]:
        """Return what this rank keeps of the state of a parameter."""
        own = dict(state)
        for key, value in state.items():
            is_whole = isinstance(value, Tensor) and value.shape == shard.param.shape
            if is_whole and shard.piece is not shard.param:
                # Not a view: it would keep all of it in memory.
                own[key] = shard.cut(_laid_out_as(shard.param, value)).clone()
        return self._on_device(own, shard.param)

    def _on_device(self, state: Mapping[str, Any], param: nn.Parameter) -> dict[str, Any]:
        """Return `state` where torch would load it to, and as what."""
        group = next(group for group in self.optimizer.param_groups if any(param is other for other in group["params"]))
        groups = [{**group, "params": [0]}]
        return {
            key: Optimizer._process_value_according_to_param_policy(param, value, 0, groups, key)
            if isinstance(value, Tensor)
            else value
            for key, value in state.items()
        }

    def _piece_of(self, param: nn.Parameter) -> nn.Parameter | None:
        shard = self.shards.get(param)
        if shard is None:
            return param
        shard.follow_param()  # also where it has no piece here: all ranks are to raise
        if shard.piece is None:
            return None
        gradient = param.grad
        if shard.piece is param:
            if isinstance(gradient, ShardedGradient):
                param.grad = plain = gradient.plain()
                self._divided[param] = plain, gradient
        else:
            if isinstance(gradient, ShardedGradient):
                gradient = gradient.own
            elif gradient is not None:  # the user has set it
                gradient = shard.cut(_laid_out_as(param, gradient))
            shard.piece.grad = gradient
        return shard.piece

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A class of the user's may call the step that it overrides: torch calls these hooks around both.
        self._num_steps_inside += 1
        if self._num_steps_inside > 1:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self.show_shards()
            return None

        def with_parameters() -> Any:
            self.show_parameters()
            loss = closure()
            self.show_shards()
            return loss

        wrapped = outside_of_graphs(with_parameters)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _after_step(self, *_: Any) -> None:
        self._num_steps_inside -= 1
        if not self._num_steps_inside:
            self.show_parameters()
            self.gathering.exchange_weights()

    def _before_load(self, _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take the state out of a checkpoint: each rank keeps its part of it only."""
        self.loaded = dict(state_dict["state"])
        return {**state_dict, "state": {}}

    def _after_load(self, _: Optimizer) -> None:
        self.adopt([self.shards[param] for param in self.params if param in self.shards])

    def _before_save(self, optimizer: Optimizer) -> None:
        if self.shards and self._whole is None:
            raise RuntimeError(
                f"The state of `{type(optimizer).__name__}` is divided among the ranks (`shard_optimizer`), and"
                " `state_dict` would have this rank's part. Save with Lightning, which gathers all of it:"
                " `trainer.save_checkpoint`, or `fabric.save`."
            )


def _size_of(state: Mapping[str, Any]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))


def _laid_out_as(param: Tensor, tensor: Tensor) -> Tensor:
    """Return `tensor` with its elements in the memory order of `param`."""
    if tensor.stride() == param.stride():
        return tensor
    return torch.empty_strided(param.shape, param.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def gather_optimizer_state(sharded: ShardedOptimizer) -> dict[str, Any]:
    """Return what `state_dict` would without sharding, on rank zero, and {} on the others. All ranks must call this.

    It is put together in host memory, tensor by tensor: no device has room for all of it.
    """
    optimizer, params = sharded.optimizer, sharded.params
    pieces = {
        place: dict(optimizer.state[shard.piece])
        for place, param in enumerate(params)
        if (shard := sharded.shards.get(param)) and shard.piece is not None and shard.piece in optimizer.state
    }
    by_rank = gather_to_rank_zero(pieces, sharded.gathering.collectives)
    if by_rank is None:
        return {}
    state: dict[int, Any] = dict(sharded.loaded)
    for place, param in enumerate(params):
        shard = sharded.shards.get(param)
        if shard is None and param in optimizer.state:
            state[place] = optimizer.state[param]
        elif shard is not None and (of_ranks := {r: own.pop(place) for r, own in enumerate(by_rank) if place in own}):
            state[place] = _put_together(of_ranks, shard)
    places = itertools.count()
    groups = [{**group, "params": [next(places) for _ in group["params"]]} for group in optimizer.param_groups]
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _put_together(of_ranks: dict[int, dict[str, Any]], shard: Shard) -> dict[str, Any]:
    """Return the state of one parameter, from the parts that ranks have of it."""
    first_rank, whole = next(iter(of_ranks.items()))
    start, stop = shard.ranges[first_rank]
    for key, value in whole.items():
        is_cut = isinstance(value, Tensor) and value.shape == (stop - start,) and stop - start < shard.param.numel()
        if is_cut:
            parts = torch.cat([own[key] for own in of_ranks.values()])
            whole[key] = parts.as_strided(shard.param.shape, shard.param.stride())
    return whole
