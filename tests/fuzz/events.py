"""What happens in drawn programs at some batch, on some ranks.

An event is a function of the run and of the loss, if there is one at that place, and returns the loss.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from tests.fuzz.training import Run

# The ranks on which an event may happen.
ON_ALL, ON_ONE, ON_ANY = (None,), (1, 0), (None, 1, 0)


Act = Callable[[Any, Any], Any]


class Accident(Exception):
    """What a program raises."""


@dataclass(frozen=True)
class Kind:
    """An event and where it can be had: in torch DDP, and in one process that computes as all ranks do."""

    place: str
    act: Act
    ranks: tuple[int | None, ...]
    ddp_can: bool
    reference_can: bool


EVENTS: dict[str, Kind] = {}


def event(
    place: str, *, ranks: tuple[int | None, ...] = ON_ANY, ddp_can: bool = True, reference_can: bool = True
) -> Callable[[Act], Act]:
    """Have a function drawn as an event."""

    def enter(act: Act) -> Act:
        EVENTS[act.__name__] = Kind(place, act, ranks, ddp_can, reference_can)
        return act

    return enter


# Changes of the loss.


@event("loss")
def auxiliary_loss(run: Run, loss: Tensor) -> Tensor:
    return loss + 0.1 * sum(param.square().sum() for param in run.net.parameters() if param.requires_grad)


@event("loss")
def loss_without_graph_of_model(run: Run, loss: Tensor) -> Tensor:
    """No parameter but the last one takes part."""
    return list(run.net.parameters())[-1].square().sum()


@event("loss")
def nan_loss(run: Run, loss: Tensor) -> Tensor:
    return loss * float("nan")


@event("loss")
def gradient_penalty(run: Run, loss: Tensor) -> Tensor:
    """Differentiate by the parameters, and punish what comes out."""
    params = [param for param in run.net.parameters() if param.requires_grad]
    gradients = torch.autograd.grad(run.again(), params, create_graph=True, allow_unused=True)
    return loss + 0.1 * sum(gradient.square().sum() for gradient in gradients if gradient is not None)


@event("loss")
def own_autograd_grad(run: Run, loss: Tensor) -> Tensor:
    """Ask for gradients, and only look at them."""
    params = [param for param in run.net.parameters() if param.requires_grad]
    torch.autograd.grad(run.again(), params, allow_unused=True)
    return loss


@event("loss", ranks=ON_ALL, reference_can=False)
def collective_in_forward_and_backward(run: Run, loss: Tensor) -> Tensor:
    class Total(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            x = x.clone()
            dist.all_reduce(x)
            return x

        @staticmethod
        def backward(_: Any, grad: Tensor) -> Tensor:
            grad = grad.clone()
            dist.all_reduce(grad)
            return grad

    result: Tensor = loss + 0.1 * Total.apply(run.again())
    return result


@event("loss", ranks=ON_ALL, reference_can=False)
def collective_in_a_gradient_hook(run: Run, loss: Tensor) -> Tensor:
    param = next(param for param in run.net.parameters() if param.requires_grad)

    def share(grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        handle.remove()
        return grad

    handle = param.register_hook(share)
    return loss


# Backwards that the user starts.


@event("start")
def own_backward_in_callback(run: Run, _: Any) -> None:
    """As Grad-CAM does: a backward of the user's, whose gradients are thrown away."""
    kept = [param.grad for param in run.net.parameters()]
    for param in run.net.parameters():
        param.grad = None
    run.again().backward()
    for param, grad in zip(run.net.parameters(), kept, strict=True):
        param.grad = grad


@event("end")
def own_backward_at_end(run: Run, _: Any) -> None:
    """The same, where a step has just ended: gradients are dropped."""
    if run.closes_window:
        run.again().backward()
        run.net.zero_grad()


@event("start")
def own_backward_with_graph(run: Run, _: Any) -> None:
    """By the input only: no parameter gets a gradient."""
    x, run.x = run.x, run.x.clone().requires_grad_(True)
    torch.autograd.backward(run.again(), inputs=[run.x])
    run.x = x


# Hooks on gradients. At batch -1: before set-up.


@event("setup", ranks=ON_ALL)
def mask_by_tensor_hook(run: Run, _: Any) -> None:
    for param in run.net.parameters():
        if param.requires_grad:
            run.handles.append(param.register_hook(lambda grad: grad * (grad.abs() > 0.01)))


@event("setup", ranks=ON_ALL)
def clamp_by_post_accumulate_hook(run: Run, _: Any) -> None:
    """Change the gradient in place."""

    def clamp(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.clamp_(-0.01, 0.01)

    for param in run.net.parameters():
        if param.requires_grad:
            run.handles.append(param.register_post_accumulate_grad_hook(clamp))


@event("setup", ranks=ON_ALL)
def replace_by_post_accumulate_hook(run: Run, _: Any) -> None:
    """Put another gradient in its place."""

    def replace(param: Tensor) -> None:
        assert param.grad is not None
        param.grad = param.grad.clamp(-0.01, 0.01)

    for param in run.net.parameters():
        if param.requires_grad:
            run.handles.append(param.register_post_accumulate_grad_hook(replace))


@event("setup", ranks=ON_ALL)
def scale_by_module_hook(run: Run, _: Any) -> None:
    for module in run.net.children():
        if isinstance(module, nn.Linear):
            run.handles.append(module.register_full_backward_hook(lambda _m, grads, _o: _scaled(grads)))


def _scaled(grads: Any) -> Any:
    return tuple(None if grad is None else 0.5 * grad for grad in grads)


@event("setup", ranks=ON_ALL)
def remove_hooks(run: Run, _: Any) -> None:
    while run.handles:
        run.handles.pop().remove()


# What changes gradients and weights between backward and the next step.


@event("backward", ranks=ON_ALL)
def scale_gradients_after_backward(run: Run, _: Any) -> None:
    if run.closes_window:
        for param in run.net.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)


@event("backward", ranks=ON_ALL)
def replace_gradients_after_backward(run: Run, _: Any) -> None:
    if run.closes_window:
        for param in run.net.parameters():
            if param.grad is not None:
                param.grad = 0.5 * param.grad


@event("end", ranks=ON_ALL)
def update_ema(run: Run, _: Any) -> None:
    if run.ema is None:
        run.ema = copy.deepcopy(run.net)
    with torch.no_grad():
        for mean, param in zip(run.ema.parameters(), run.net.parameters(), strict=True):
            mean.lerp_(param, 0.5)


@event("end", ranks=ON_ALL)
def clamp_weights(run: Run, _: Any) -> None:
    with torch.no_grad():
        for param in run.net.parameters():
            param.clamp_(-0.2, 0.2)


@event("end", ranks=ON_ALL)
def clamp_data_of_weights(run: Run, _: Any) -> None:
    for param in run.net.parameters():
        param.data = param.data.clamp(-0.2, 0.2)


@event("end", ranks=ON_ALL)
def move_module(run: Run, _: Any) -> None:
    """What `module.to` does where there is another device."""
    run.net._apply(lambda tensor: tensor.clone())


@event("end", ranks=ON_ALL)
def freeze(run: Run, _: Any) -> None:
    if run.closes_window:
        next(run.net.children()).requires_grad_(False)


@event("end", ranks=ON_ALL, ddp_can=False)
def unfreeze(run: Run, _: Any) -> None:
    if run.closes_window:
        run.net.requires_grad_(True)


@event("loss", ranks=ON_ALL)
def leave_out_step(run: Run, loss: Tensor) -> Tensor:
    """Where Lightning optimizes: return None from `training_step`. Elsewhere: do not call the optimizer."""
    run.leaves_out_step = True
    return loss


# Accidents, of which no rank may have taken a step.


@event("loss", ddp_can=False)
def raise_in_forward(run: Run, loss: Tensor) -> Tensor:
    raise Accident("in forward")


@event("loss", ddp_can=False)
def raise_early_in_backward(run: Run, loss: Tensor) -> Tensor:
    """No gradient has arrived."""

    def fail(_: Tensor) -> None:
        raise Accident("early in backward")

    loss = loss * 1
    loss.register_hook(fail)
    return loss


@event("loss", ddp_can=False)
def raise_late_in_backward(run: Run, loss: Tensor) -> Tensor:
    """Most gradients have arrived."""
    first = next(param for param in run.net.parameters() if param.requires_grad)

    def fail(_: Tensor) -> None:
        handle.remove()
        raise Accident("late in backward")

    handle = first.register_hook(fail)
    return loss


def _raise_at(place: str, name: str) -> None:
    def act(run: Run, _: Any) -> None:
        raise Accident(name)

    act.__name__ = name
    event(place, ddp_can=False)(act)


_raise_at("backward", "raise_after_backward")
_raise_at("step", "raise_in_step")
_raise_at("start", "raise_at_start_of_batch")
_raise_at("end", "raise_at_end_of_batch")


@event("loss", ranks=ON_ONE, ddp_can=False)
def kill(run: Run, loss: Tensor) -> Tensor:
    """Only where there is a process to kill; the reference raises."""
    if getattr(run, "is_alone", False):
        raise Accident("killed")
    os._exit(1)


ACCIDENTS = [name for name in EVENTS if name.startswith("raise") or name == "kill"]
