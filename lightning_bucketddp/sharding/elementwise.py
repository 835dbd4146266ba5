"""Which optimizers can be divided among ranks, and how: by elements, by whole parameters, or not at all.

An optimizer does not declare whether its step computes a number over several parameters, as LAMB does with the norm of
all gradients: each rank would have a different one, without an error. So only those are divided that are known, or
whose author declares it (`elementwise`, `per_parameter`). All but torch's own are tried before training begins: a twin
steps small tensors together, others step shards of them, and the weights must be the same. That is no proof, but it
finds what is wrong in the first steps.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Torch's optimizers that step each element by its own gradient and state.
_ELEMENTWISE = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]
# Torch's optimizers that step each parameter by its own gradient and state; not all versions of torch have them.
_PER_PARAMETER = ["Adafactor", "Muon"]
# Optimizers of other packages, by the name that they have in all of them. Some `Lion`s have options that are not
# element-wise, which is tried.
_ELEMENTWISE_NAMES = {"Lion"}
_PER_PARAMETER_NAMES = {"Adafactor", "AdafactorBigVision", "LARS", "Lars", "Lion", "Shampoo", "SOAP"}
# Methods that change weights outside of a step, by state of which each rank has a shard.
_OTHER_STEPS = ("train", "eval")

# Of the steps, so that what is clipped, or compared with steps before, is so in some of them.
_SCALES = (0.1, 10.0, 1.0, 3.0)
_NUM_GROUPS, _NUM_PER_GROUP, _LARGEST_SIZE = 4, 2, 6

_CLAIMS = (
    "If each element is stepped by its own gradient and state alone, set `elementwise = True` on the class; if each"
    " parameter is, set `per_parameter = True`. Otherwise use another optimizer, or `shard_optimizer=False`"
)
_NO_CLAIM = "Use another optimizer, or `shard_optimizer=False`"


def divides_by_elements(optimizer: Optimizer, *, whole_parameters: bool) -> bool:
    """Return whether a shard may be any range of a parameter; if not, or with `whole_parameters`, it is all of it.

    Raise a ValueError with the reason if neither gives the same numbers.
    """
    if (reason := _explain_refusal(optimizer)) is not None:
        raise _refusal(optimizer, reason, _NO_CLAIM)
    if _is_one_of(_ELEMENTWISE, optimizer) and getattr(optimizer, "elementwise", True):
        return not whole_parameters
    if _is_one_of(_PER_PARAMETER, optimizer):
        return False
    name = type(optimizer).__name__
    claims_elements = bool(getattr(optimizer, "elementwise", False))
    reason = "it is not known whether its step computes anything over several parameters, of which each rank has some"
    if claims_elements or getattr(optimizer, "per_parameter", False) or name in _PER_PARAMETER_NAMES:
        by_elements = not whole_parameters and (claims_elements or name in _ELEMENTWISE_NAMES)
        reason = _try(optimizer, by_elements=by_elements)
        if reason is not None and by_elements and not claims_elements:
            by_elements = False
            reason = _try(optimizer, by_elements=False)
        if reason is None:
            return by_elements
    raise _refusal(optimizer, reason, _CLAIMS)


def _refusal(optimizer: Optimizer, reason: str, remedy: str) -> ValueError:
    name = type(optimizer).__name__
    return ValueError(f"`shard_optimizer` cannot divide the state of `{name}`: {reason}. {remedy}.")


def _explain_refusal(optimizer: Optimizer) -> str | None:
    """Return why dividing the state of `optimizer` cannot be right, whatever its step does; None: it can."""
    if hasattr(optimizer, "consolidate_state_dict"):
        return "it divides its state by itself"
    if others := [name for name in _OTHER_STEPS if callable(getattr(optimizer, name, None))]:
        return f"its `{others[0]}()` changes weights outside of a step, by state of which each rank has a part"
    params = {param for group in optimizer.param_groups for param in group["params"]}
    if any(isinstance(param, Tensor) and param not in params for param in optimizer.state):
        return "it has a part of the state that an earlier run has divided; make a new one, and load a checkpoint"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "with `differentiable=True` a gradient flows through its step, but not through an exchange of weights"
    return None


def _is_one_of(names: Sequence[str], optimizer: Optimizer) -> bool:
    """Return whether `optimizer` is one of torch's, or of a subclass that changes no method and adds none."""
    kinds = type(optimizer).__mro__
    of_torch = [getattr(torch.optim, name, None) for name in names]
    known: Any = next((kind for kind in kinds if kind in of_torch), None)
    if known is None:
        return False
    methods = {
        (name, inspect.unwrap(value))  # torch wraps the step of each class that has an instance
        for kind in kinds[: kinds.index(known)]
        for name, value in vars(kind).items()
        if callable(value) and not name.startswith("__")
    }
    return methods <= {("step", inspect.unwrap(known.step))}


def _try(optimizer: Optimizer, *, by_elements: bool) -> str | None:
    """Step small tensors whole and divided; return why `optimizer` cannot be divided, or None."""
    device = next((param.device for group in optimizer.param_groups for param in group["params"]), torch.device("cpu"))
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        torch.manual_seed(0)
        trial = _Trial(optimizer, device)
        places = range(len(trial.tensors))
        shards: list[list[slice]]
        if by_elements:  # halves of each tensor
            halves = [tensor.numel() // 2 for tensor in trial.tensors]
            shards = [[slice(0, half) for half in halves], [slice(half, None) for half in halves]]
        else:  # each second tensor
            shards = [[slice(None if place % 2 == turn else 0) for place in places] for turn in (0, 1)]
        try:
            whole = trial.step([slice(None) for _ in places])
            divided = [torch.cat(halves) for halves in zip(*map(trial.step, shards), strict=True)]
        except Exception as error:
            return f"a step of it on small tensors, without a closure, has raised `{type(error).__name__}: {error}`"
    moved = _distance(whole, [tensor.flatten() for tensor in trial.tensors])
    if _distance(whole, divided) <= 1e-3 * moved:
        return None
    return f"its step computes something over several {'elements' if by_elements else 'parameters'}"


class _Trial:
    """Steps of small tensors by twins of an optimizer, in its groups and by its settings."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._groups = [(group, group["params"][:_NUM_PER_GROUP]) for group in optimizer.param_groups[:_NUM_GROUPS]]
        shapes = [[min(size, _LARGEST_SIZE) for size in param.shape] for _, like in self._groups for param in like]
        self.tensors = [0.02 * torch.randn(shape).to(device) for shape in shapes]
        self._gradients = [[scale * torch.randn(shape).to(device) for shape in shapes] for scale in _SCALES]

    def step(self, slices: Sequence[slice]) -> list[Tensor]:
        """Return these slices of the tensors, in one dimension, after a twin has stepped them."""
        params = [nn.Parameter(_cut(tensor, place)) for tensor, place in zip(self.tensors, slices, strict=True)]
        memory = [param.data_ptr() for param in params]
        twin = self._twin(params)
        for gradients in self._gradients:
            for param, gradient, place in zip(params, gradients, slices, strict=True):
                param.grad = _cut(gradient, place)
            twin.step()
            if any(param.grad is None for param in params):
                raise RuntimeError("It sets gradients to None, which other ranks would not see")
        if [param.data_ptr() for param in params] != memory:
            raise RuntimeError("It gives parameters other memory, instead of changing them in place")
        return [param.detach().flatten() for param in params]

    def _twin(self, params: Sequence[nn.Parameter]) -> Optimizer:
        """Return an optimizer like the real one, without state, of `params`; empty ones are another rank's."""
        twin = object.__new__(type(self._optimizer))
        remaining = iter(params)
        mine = [[next(remaining) for _ in like] for _, like in self._groups]
        # Whatever else refers to parameters refers to none that counts.
        nothing = nn.Parameter(torch.empty(0))
        memo: dict[int, Any] = {id(p): nothing for group in self._optimizer.param_groups for p in group["params"]}
        for (_, like), own in zip(self._groups, mine, strict=True):
            memo.update({id(param): twin_param for param, twin_param in zip(like, own, strict=True)})
        for name, value in vars(self._optimizer).items():
            if name.endswith("_hooks"):
                twin.__dict__[name] = OrderedDict()
            elif name not in ("step", "state", "param_groups"):  # a scheduler has wrapped its step
                twin.__dict__[name] = copy.deepcopy(value, memo)
        twin.state = defaultdict(dict)
        twin.param_groups = []
        for (group, _), own in zip(self._groups, mine, strict=True):
            settings = {name: copy.deepcopy(value, memo) for name, value in group.items() if name != "params"}
            lr = settings.get("lr")
            if lr is not None and not lr:  # a warm-up begins with no rate: nothing would happen
                settings["lr"] = lr + (settings.get("initial_lr") or 0.01)
            twin.param_groups.append({**settings, "params": [param for param in own if param.numel()]})
        return twin


def _cut(tensor: Tensor, place: slice) -> Tensor:
    return tensor.clone() if place == slice(None) else tensor.flatten()[place].clone()


def _distance(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    apart = [float((one - other).abs().max()) for one, other in zip(ones, others, strict=True) if one.numel()]
    return max(apart, default=0.0)
