"""Which optimizers can be divided among ranks, and how."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# Each element of a parameter is stepped by its own gradient and its own state. Torch's own classes, and one that every
# package has under the same name.
_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
_ELEMENTWISE_NAMES = {"Lion"}

# A number that is computed over all parameters, which would be another on each rank.
_GLOBAL_NAMES = {
    **dict.fromkeys(
        ("Prodigy", "DAdaptAdam", "DAdaptSGD", "DAdaptLion", "DAdaptAdaGrad", "DAdaptAdan"),
        "it computes one step size from all parameters, and each rank would have another",
    ),
    **dict.fromkeys(
        ("SAM", "ASAM", "GSAM", "WSAM", "LookSAM"),
        "it moves all weights by the norm of all gradients between two backwards, and each rank would have another",
    ),
    "SparseAdam": "its gradients are sparse, and no rank could own the rows of a gradient before it is there",
    "ZeroRedundancyOptimizer": "it divides its state by itself",
}


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` may see any part of a parameter: torch's own, or one with `elementwise = True`."""
    kind = type(optimizer)
    says = getattr(optimizer, "elementwise", None)
    if says is not None:
        return bool(says)
    if kind.__name__ in _ELEMENTWISE_NAMES:
        return True
    # A class of the user's may change more than the numbers of torch's.
    return any(isinstance(optimizer, known) and _step_of(kind) is _step_of(known) for known in _ELEMENTWISE)


def explain_refusal(optimizer: Optimizer) -> str | None:
    """Return why dividing the state of `optimizer` could not give the same numbers; None: it does."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return "it searches along a direction of all parameters together, and each rank would have another"
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _GLOBAL_NAMES:
            return _GLOBAL_NAMES[kind.__name__]
    if hasattr(optimizer, "consolidate_state_dict"):
        return _GLOBAL_NAMES["ZeroRedundancyOptimizer"]
    params = {param for group in optimizer.param_groups for param in group["params"]}
    if any(isinstance(param, Tensor) and param not in params for param in optimizer.state):
        return "it has a part of the state that an earlier run has divided; make a new one, and load a checkpoint"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "with `differentiable=True` a gradient flows through its step, but not through an exchange of weights"
    return None


def _step_of(kind: Any) -> Any:
    # Each class with an instance gets a wrapper of its own around the same function.
    return inspect.unwrap(kind.step)
