"""Weights that other ranks have stepped, and that arrive while this rank goes on.

Note: weights on their way
    After an optimizer's step each rank has new weights in its own share of a bucket only. The exchange of shares is
    started at once, and waited for where something needs a weight. Until then the bucket's parameters are of another
    class: torch asks it first whatever is done with one of them, be it a forward, a checkpoint, an average of weights
    or a look at its numbers, in whatever module; and then the bucket is waited for. torch changes the class of a lazy
    parameter in the same way.

    Kernels that torch does not dispatch are not seen: a module that is not torch's own may pass its weights to one, so
    its forward waits for them. A scripted module cannot; dynamo guards on the class of parameters, and a captured graph
    has no host that could wait later: there, and on side streams, where steps are warmed up to be captured, the
    exchange ends with the step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.reducer.graphs import is_being_captured

# What can be asked of a parameter whose weights are on their way. An optimizer's `zero_grad` asks for gradients.
_OF_NO_WEIGHTS = {"grad", "requires_grad", "shape", "dtype", "device", "is_leaf", "layout", "requires_grad_", "numel"}


class GatheringParameter(nn.Parameter):
    """A parameter whose weights are on their way (Note: weights on their way)."""

    finish_gathering: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if (func.__self__.__name__ if name in ("__get__", "__set__") else name) in _OF_NO_WEIGHTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for param in _gathering_in((args, kwargs)):
            param.finish_gathering()
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.finish_gathering()
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.finish_gathering()
        return self.__reduce_ex__(protocol)


def _gathering_in(values: Any) -> Iterator[GatheringParameter]:
    if type(values) is GatheringParameter:
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _gathering_in(value)
    elif isinstance(values, dict):
        yield from _gathering_in(list(values.values()))


def can_arrive_later(params: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Return whether new weights of `params` can be waited for when they are needed."""
    is_plain = all(type(param) is nn.Parameter for param in params)
    return is_plain and not _may_be_captured(device) and not _dynamo_has_compiled()


def mark_gathering(params: Sequence[Any], finish: Callable[[], None]) -> None:
    """Have `finish` called before anything uses the weights of one of `params`."""
    for param in params:
        param.finish_gathering = finish
        param.__class__ = GatheringParameter


def unmark_gathering(params: Sequence[Any]) -> None:
    """Make ordinary parameters of those whose weights have arrived."""
    for param in params:
        param.__class__ = nn.Parameter
        del param.finish_gathering


def wait_before_forward(module: nn.Module) -> list[RemovableHandle]:
    """Have modules that may pass weights to kernels unseen wait before their forward; return what takes that back."""

    def wait(module: nn.Module, _args: Any) -> None:
        for param in module.parameters(recurse=False):
            if type(param) is GatheringParameter:
                param.finish_gathering()

    return [
        part.register_forward_pre_hook(wait)
        for part in module.modules()
        if any(True for _ in part.parameters(recurse=False))
        and not type(part).__module__.startswith("torch.nn.")
        and not isinstance(part, torch.jit.ScriptModule)
    ]


def _may_be_captured(device: torch.device) -> bool:
    """Return whether a graph is being captured or will be: torch advises to warm up on a side stream for that."""
    if device.type != "cuda":
        return False
    return bool(torch.cuda.current_stream(device) != torch.cuda.default_stream(device)) or is_being_captured(device)


def scripted_params(module: nn.Module) -> set[torch.Tensor]:
    """Return the parameters that a scripted part of `module` uses, of which Python sees nothing."""
    scripted = (part for part in module.modules() if isinstance(part, torch.jit.ScriptModule))
    return {param for part in scripted for param in part.parameters()}


def _dynamo_has_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])
