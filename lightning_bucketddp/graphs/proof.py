"""What a step begins with and what it has computed, to run it twice and to compare; and what a batch looks like."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_bucketddp.graphs.python_state import NotCapturedError
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.trainer_internals import ClosureParts

# Kernels that add in no fixed order differ from run to run by rounding.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_OTHER_ROUNDING = 2e-2


@dataclass(frozen=True)
class Outcome:
    """What a step has computed."""

    values: list[Tensor]
    gradients: list[Tensor | None]
    buffers: list[Tensor]

    @classmethod
    def of(cls, module: nn.Module, values: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Outcome:
        """Copy it."""
        copies = [None if gradient is None else gradient.clone() for gradient in gradients]
        return cls([value.clone() for value in values], copies, [buffer.clone() for buffer in module.buffers()])

    def find_difference(self, other: Outcome, module: nn.Module) -> str:
        """Return what is another there, in words; empty: nothing is, but for rounding."""
        if len(self.values) != len(other.values):
            return "the number of logged values"
        names = ["the loss", *("an output or a logged value" for _ in self.values[1:])]
        names += [f"the gradient of `{name}`" for name, _ in module.named_parameters()]
        names += [f"`{name}`" for name, _ in module.named_buffers()]
        ours = [*self.values, *self.gradients, *self.buffers]
        theirs = [*other.values, *other.gradients, *other.buffers]
        for name, one, another in zip(names, ours, theirs, strict=True):
            if not _are_alike(one, another):
                return name
        return ""


def _are_alike(one: Tensor | None, another: Tensor | None) -> bool:
    if one is None or another is None:
        return one is another
    if one.shape != another.shape or one.dtype != another.dtype:
        return False
    if torch.equal(one, another) or not one.numel():
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    one, another = one.nan_to_num(), another.nan_to_num()
    tolerance = _ROUNDING.get(one.dtype, _OTHER_ROUNDING)
    return bool((one - another).abs().max() <= tolerance * another.abs().max())


class StepStart:
    """What a step begins with: its gradients, buffers and random numbers."""

    def __init__(self, module: nn.Module, closure: ClosureParts, device: torch.device, reducer: Reducer) -> None:
        self._module = module
        self._optimizer = closure.optimizer
        self._zeroes = closure.zero_grad is not None
        self._device = device
        self.loss_digest = reducer.finiteness.loss_digest
        zeroed = {id(param) for group in closure.optimizer.param_groups for param in group["params"]}
        self._gradients = [
            (param, param.grad, param.grad.clone())
            for param in module.parameters()
            if param.grad is not None and not (self._zeroes and id(param) in zeroed)
        ]
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self._random_state = self._get_random_state()

    def _get_random_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()

    @torch.no_grad()
    def restore(self, *, zero: bool = False) -> None:
        """Have all of it as it was; `zero`: as it is after `zero_grad`."""
        if zero and self._zeroes:
            self._optimizer.zero_grad()
        for param, gradient, copied in self._gradients:
            param.grad = gradient
            gradient.copy_(copied)
        for buffer, copied in self._buffers:
            buffer.copy_(copied)
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._random_state, self._device)
        else:
            torch.set_rng_state(self._random_state)

    def outcome(self, values: list[Tensor]) -> Outcome:
        """Return what a step has computed that ended with this; nothing is copied."""
        by_param = {id(param): copied for param, _, copied in self._gradients}
        gradients = [by_param.get(id(param)) for param in self._module.parameters()]
        return Outcome(values, gradients, [copied for _, copied in self._buffers])

    def keep(self) -> StepStart:
        """Return the same of now, with copies of all gradients in the place of those that there are."""
        kept = copy.copy(self)
        kept._gradients = [
            (param, copied, copied)
            for param in self._module.parameters()
            if param.grad is not None and (copied := param.grad.clone()) is not None
        ]
        kept._buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        kept._random_state = self._get_random_state()
        return kept


def tensors_in(collection: Any) -> list[Tensor]:
    """Return all tensors in a collection, in their order."""
    tensors: list[Tensor] = []
    apply_to_collection(collection, Tensor, tensors.append)
    return tensors


def signature_of(value: Any, tensors: list[Tensor], device: torch.device) -> Any:
    """Return what a graph has fixed of a batch, hashable, and append its tensors to `tensors`, in their order."""
    if isinstance(value, Tensor):
        if value.device != device:
            raise NotCapturedError(f"the batch has a tensor on {value.device}")
        if value.layout is not torch.strided or type(value) is not Tensor:
            raise NotCapturedError(f"the batch has a tensor of another kind, `{type(value).__name__}`")
        tensors.append(value)
        return value.shape, value.stride(), value.dtype
    if isinstance(value, str | bytes | int | float | bool | type(None)):
        return type(value), value
    if isinstance(value, Mapping):
        return type(value), tuple((key, signature_of(each, tensors, device)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(signature_of(each, tensors, device) for each in value)
    if is_dataclass(value):
        return type(value), tuple(signature_of(getattr(value, field.name), tensors, device) for field in fields(value))
    raise NotCapturedError(f"the batch has a `{type(value).__name__}`, which is unknown")
