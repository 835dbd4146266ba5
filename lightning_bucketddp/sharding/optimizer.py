"""An optimizer that steps this rank's shards of its parameters, and has the state of those only.

While an optimizer steps, its parameter groups hold this rank's shards (`bucket.ShardedParameter`). At all other times
they hold parameters: for schedulers, clipping, `zero_grad`, `toggle_optimizer`, callbacks that add a group, and hooks
around the step. The step ends with an exchange of weights: when it returns, and for all hooks after it, each rank has
all of them, in the memory where they have always been.
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
from lightning_bucketddp.reducer.observer import NO_OBSERVER, BackwardObserver, is_being_captured, outside_of_graphs
from lightning_bucketddp.sharding.bucket import ShardedBucket, ShardedLayout, ShardedParameter, exchange_weights
from lightning_bucketddp.sharding.gradient import GlobalNorms, ShardedGradient


class ShardedOptimizer:
    """An optimizer that steps this rank's shards only.

    `is_elementwise`: a shard may be any range of a parameter, otherwise it is all of it or nothing.
    """

    def __init__(self, optimizer: Optimizer, norms: GlobalNorms, *, is_elementwise: bool) -> None:
        self.optimizer = optimizer
        self.is_elementwise = is_elementwise
        self.norms = norms
        self.collectives = norms.collectives
        self.members: dict[nn.Parameter, ShardedParameter] = {}
        self.layouts: list[ShardedLayout] = []
        # A step has begun and not ended, or failed: the weights are not those of one step.
        self.is_partial = False
        self.observer: BackwardObserver = NO_OBSERVER  # another one is set while steps are recorded
        # State from a checkpoint, by position of the parameter, until the first layout is made.
        self.loaded: dict[int, Any] = {}
        self.loads = [0] * self.collectives.world_size  # bytes that each rank owns, by rank
        self._whole: list[list[nn.Parameter]] | None = None
        # Of parameters that this rank owns, while they are stepped: the gradient that is stepped, and the divided one.
        self._plain: dict[nn.Parameter, tuple[Tensor, ShardedGradient]] = {}
        self._num_steps_inside = 0
        self._exchanged: Any = None  # an event, recorded when the weights of a step have arrived
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
        """Make this an ordinary optimizer again, with the state of this rank's shards."""
        self.show_parameters()
        for handle in self._handles:
            handle.remove()
        if self.optimizer.step is self._own_step:  # otherwise the user has wrapped it, which is harmless
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
    def buckets(self) -> list[ShardedBucket]:
        return [layout.bucket for layout in self.layouts if layout.bucket is not None]

    @property
    def has_exchanged(self) -> bool:
        """Whether the weights of the last step have arrived on the device, too."""
        return not self.is_partial and (self._exchanged is None or bool(self._exchanged.query()))

    @property
    def state_bytes(self) -> int:
        return sum(map(_size_of, self.optimizer.state.values()))

    @property
    def whole_state_bytes(self) -> int:
        """What the state would take undivided, estimated from this rank's shards."""
        shards = [member.shard for member in self.members.values() if member.shard is not None]
        own = sum(shard.nbytes for shard in shards)
        of_own = sum(_size_of(self.optimizer.state.get(shard, {})) for shard in shards)
        whole = sum(member.param.nbytes for member in self.members.values())
        return self.state_bytes - of_own + (round(of_own * whole / own) if own else 0)

    def show_shards(self) -> None:
        """Replace `param_groups` by this rank's shards, with their gradients, for the duration of a step."""
        assert self._whole is None
        params = self.params if self.loaded else []
        for place in [place for place in self.loaded if params[place] not in self.members]:
            self.optimizer.state[params[place]] = self._on_device(self.loaded.pop(place), params[place])
        for bucket in self.buckets:
            bucket.divided_gradients()  # raises if one is of an earlier backward
        self._whole = [group["params"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["params"] = [shard for param in group["params"] if (shard := self._shard_of(param)) is not None]
        self.is_partial = True  # until weights are exchanged

    def _shard_of(self, param: nn.Parameter) -> nn.Parameter | None:
        """Return what is stepped of `param` on this rank, with its gradient; None: nothing."""
        member = self.members.get(param)
        if member is None:
            return param
        member.follow_param()  # also where this rank has no shard: all ranks are to raise
        gradient = param.grad
        if member.shard is param:
            if isinstance(gradient, ShardedGradient):
                param.grad = plain = gradient.plain()
                self._plain[param] = plain, gradient
        elif member.shard is not None:
            if isinstance(gradient, ShardedGradient):
                gradient = gradient.own
            elif gradient is not None:  # the user has set it
                gradient = member.cut(_laid_out_as(param, gradient))
            member.shard.grad = gradient
        return member.shard

    def show_parameters(self) -> None:
        """Undo `show_shards`."""
        if self._whole is None:
            return
        for group, params in zip(self.optimizer.param_groups, self._whole, strict=True):
            group["params"] = params
        self._whole = None
        for member in self.members.values():
            if member.shard is not None and member.shard is not member.param:
                member.shard.grad = None
        for param, (plain, gradient) in self._plain.items():
            if param.grad is plain:
                param.grad = gradient
        self._plain.clear()

    def begin_backward(self) -> None:
        """Make gradients whole again where a backward is about to add to them."""
        # Hooks that were registered since see parameters, not shards.
        hooks = self.optimizer._optimizer_step_pre_hooks
        hooks[self._before.id] = hooks.pop(self._before.id)
        for bucket in self.buckets:
            if any(member.param.requires_grad for member in bucket.layout.members) and bucket.divided_gradients():
                bucket.gather_gradients()

    def adopt(self, members: Sequence[ShardedParameter]) -> None:
        """Step the shards of `members` from now on; state that is there already is cut."""
        place_of = {param: place for place, param in enumerate(self.params)}
        for member in members:
            self.members[member.param] = member
            whole = self.loaded.pop(place_of[member.param], None) or self.optimizer.state.pop(member.param, None)
            if whole and member.shard is not None:
                self.optimizer.state[member.shard] = self._cut_state(whole, member)

    def _cut_state(self, state: Mapping[str, Any], member: ShardedParameter) -> dict[str, Any]:
        """Return what this rank keeps of the state of a parameter."""
        own = dict(state)
        for key, value in state.items():
            is_whole = isinstance(value, Tensor) and value.shape == member.param.shape
            if is_whole and member.shard is not member.param:
                # Not a view: it would keep all of it in memory.
                own[key] = member.cut(_laid_out_as(member.param, value)).clone()
        return self._on_device(own, member.param)

    def _on_device(self, state: Mapping[str, Any], param: nn.Parameter) -> dict[str, Any]:
        """Return `state` on the device, and of the dtype, to which torch would load it."""
        group = next(group for group in self.optimizer.param_groups if any(param is other for other in group["params"]))
        groups = [{**group, "params": [0]}]
        return {
            key: Optimizer._process_value_according_to_param_policy(param, value, 0, groups, key)
            if isinstance(value, Tensor)
            else value
            for key, value in state.items()
        }

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # torch calls these hooks around the step of Fabric's wrapper, too, once that has been copied.
        if optimizer is not self.optimizer:
            return None
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

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is not self.optimizer:
            return
        self._num_steps_inside -= 1
        if self._num_steps_inside:
            return
        self.show_parameters()
        # On all ranks the same buckets in the same order: after an averaged backward they have the same gradients.
        stepped = [bucket for bucket in self.buckets if any(one.param.grad is not None for one in bucket.members)]
        with torch.no_grad():
            exchange_weights(stepped, self.observer)
        self.norms.forget()  # some optimizers change gradients
        self.is_partial = False
        device = self.collectives.device
        if device.type == "cuda" and not is_being_captured(device):
            self._exchanged = self._exchanged or torch.Event(device)
            self._exchanged.record()

    def _before_load(self, _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take the state out of a checkpoint: each rank keeps that of its shards only."""
        if not state_dict:
            raise ValueError(
                "There is no state to load on this rank: with `shard_optimizer`, `state_dict()` returns all of it on"
                " rank zero, and {} on the others. Load `fabric.broadcast(state)`."
            )
        self.loaded = dict(state_dict["state"])
        return {**state_dict, "state": {}}

    def _after_load(self, _: Optimizer) -> None:
        self.adopt([self.members[param] for param in self.params if param in self.members])

    def _before_save(self, optimizer: Optimizer) -> None:
        if self.members and self._whole is None:
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
    own_states = {
        place: dict(optimizer.state[member.shard])
        for place, param in enumerate(params)
        if (member := sharded.members.get(param)) and member.shard is not None and member.shard in optimizer.state
    }
    by_rank = gather_to_rank_zero(own_states, sharded.collectives)
    if by_rank is None:
        return {}
    state: dict[int, Any] = dict(sharded.loaded)
    for place, param in enumerate(params):
        member = sharded.members.get(param)
        if member is None and param in optimizer.state:
            state[place] = optimizer.state[param]
        elif member is not None and (shards := {r: own.pop(place) for r, own in enumerate(by_rank) if place in own}):
            state[place] = _merge(shards, member)
    places = itertools.count()
    groups = [{**group, "params": [next(places) for _ in group["params"]]} for group in optimizer.param_groups]
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _merge(shards: dict[int, dict[str, Any]], member: ShardedParameter) -> dict[str, Any]:
    """Return the state of one parameter, from that of its `shards`, by rank."""
    first_rank, whole = next(iter(shards.items()))
    start, stop = member.ranges[first_rank]
    for key, value in whole.items():
        is_cut = isinstance(value, Tensor) and value.shape == (stop - start,) and stop - start < member.param.numel()
        if is_cut:
            joined = torch.cat([own[key] for own in shards.values()])
            whole[key] = joined.as_strided(member.param.shape, member.param.stride())
    return whole
