"""Optimizers that can be divided among the ranks are, and all others are refused with the reason and what helps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy as FabricStrategy
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.sharding.elementwise import divides_by_elements
from tests.support.cases import for_each
from tests.support.jobs.sharding import OPTIMIZERS, Muonlike, Signs, _lamb
from tests.support.ranks import on_ranks
from tests.support.scripts import fabrics, models
from tests.support.scripts.trainers import like_torchrun, make_trainer

Make = Callable[[Iterable[Any]], Optimizer]


class Stepping(Optimizer):
    """Calls `update` for each parameter with a gradient."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.prepare([p for group in self.param_groups for p in group["params"] if p.grad is not None])
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.update(param, group), alpha=group["lr"])
        return loss

    def prepare(self, params: list[Any]) -> None:
        pass

    def update(self, param: Any, group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class GlobalLamb(Stepping):
    """Clips by the norm of all gradients, and steps in proportion to each weight, as timm's."""

    def prepare(self, params: list[Any]) -> None:
        norm = torch.stack([p.grad.norm() for p in params]).norm() if params else torch.zeros(())
        self._clip = float(norm.clamp(min=1.0))

    def update(self, param: Any, group: dict[str, Any]) -> Tensor:
        update: Tensor = param.grad / self._clip * param.norm()
        return update


class Lion(Stepping):
    def update(self, param: Any, group: dict[str, Any]) -> Tensor:
        mean = self.state[param].setdefault("mean", torch.zeros_like(param))
        update = mean.lerp(param.grad, 0.1).sign()
        mean.lerp_(param.grad, 0.01)
        if group.get("caution"):
            mask = (update * param.grad > 0).to(update.dtype)
            update = update * mask / mask.mean().clamp(min=1e-3)
        return update


class LARS(Stepping):
    def update(self, param: Any, group: dict[str, Any]) -> Tensor:
        gradient: Tensor = param.grad
        return gradient * param.norm() / (gradient.norm() + 1e-8)


class ScheduleFree(Signs):
    """Element-wise, but `train` changes weights, too."""

    def train(self) -> None:
        pass


class OutOfPlace(Stepping):
    elementwise = True

    def update(self, param: Any, group: dict[str, Any]) -> Tensor:
        param.data = param.data.clone()
        gradient: Tensor = param.grad
        return gradient


class ClearsGradients(Stepping):
    elementwise = True

    def update(self, param: Any, group: dict[str, Any]) -> Tensor:
        gradient, param.grad = param.grad, None
        return gradient


class RenamedAdam(torch.optim.Adam):
    """Steps as torch's."""


class TakesBack(RenamedAdam):
    elementwise = False


class OwnGroups(torch.optim.Adam):
    """Keeps torch's `step`, and changes what that calls."""

    def _init_group(self, group: Any, *args: Any) -> Any:
        for param in group["params"]:
            if param.grad is not None and param.grad.dim() > 1:
                param.grad.sub_(param.grad.mean())
        return super()._init_group(group, *args)


def claiming(kind: Make, *, claim: str) -> Make:
    """Return `kind` with the attribute `claim`."""

    def make(params: Iterable[Any]) -> Optimizer:
        optimizer = kind(params)
        setattr(optimizer, claim, True)
        return optimizer

    return make


def _zero(params: Iterable[Any]) -> Optimizer:
    optimizer = torch.optim.Adam(params)
    optimizer.consolidate_state_dict = lambda: None  # type: ignore[attr-defined]
    return optimizer


def _in_warm_up(params: Iterable[Any]) -> Optimizer:
    optimizer = claiming(GlobalLamb, claim="per_parameter")(params)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    assert optimizer.param_groups[0]["lr"] == 0
    return optimizer


CLAIMS = (
    "If each element is stepped by its own gradient and state alone, set `elementwise = True` on the class; if each"
    " parameter is, set `per_parameter = True`. Otherwise use another optimizer, or `shard_optimizer=False`."
)
NO_CLAIM = "Use another optimizer, or `shard_optimizer=False`."
UNKNOWN = "it is not known whether its step computes anything over several parameters, of which each rank has some"
OVER_PARAMETERS = "its step computes something over several parameters"
OVER_ELEMENTS = "its step computes something over several elements"

BY_ELEMENTS: dict[str, Make] = {
    **OPTIMIZERS,
    "renamed": RenamedAdam,
    "Lion": Lion,
    "claimed": claiming(Lion, claim="elementwise"),
}
BY_PARAMETERS: dict[str, Make] = {
    "Muon": Muonlike,
    "LAMB without a norm of all": _lamb,
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "torch's Muon": lambda params: torch.optim.Muon(list(params)[:1]) if hasattr(torch.optim, "Muon") else LARS(params),
    "LARS": LARS,
    "cautious Lion": lambda params: Lion(params, caution=True),
    "claimed": claiming(OwnGroups, claim="per_parameter"),
}
REFUSED: dict[str, tuple[Make, str, str]] = {
    "LAMB": (GlobalLamb, UNKNOWN, CLAIMS),
    "LBFGS": (torch.optim.LBFGS, UNKNOWN, CLAIMS),
    "SparseAdam": (torch.optim.SparseAdam, UNKNOWN, CLAIMS),
    "own groups": (OwnGroups, UNKNOWN, CLAIMS),
    "takes back": (TakesBack, UNKNOWN, CLAIMS),
    "LAMB that claims parameters": (claiming(GlobalLamb, claim="per_parameter"), OVER_PARAMETERS, CLAIMS),
    "LAMB in a warm-up": (_in_warm_up, OVER_PARAMETERS, CLAIMS),
    "LARS that claims elements": (claiming(LARS, claim="elementwise"), OVER_ELEMENTS, CLAIMS),
    "Muon that claims elements": (claiming(Muonlike, claim="elementwise"), OVER_ELEMENTS, CLAIMS),
    "schedule-free": (
        ScheduleFree,
        "its `train()` changes weights outside of a step, by state of which each rank has a part",
        NO_CLAIM,
    ),
    "out of place": (
        OutOfPlace,
        "a step of it on small tensors, without a closure, has raised `RuntimeError: It gives parameters other memory,"
        " instead of changing them in place`",
        CLAIMS,
    ),
    "clears gradients": (
        ClearsGradients,
        "a step of it on small tensors, without a closure, has raised `RuntimeError: It sets gradients to None, which"
        " other ranks would not see`",
        CLAIMS,
    ),
    "differentiable": (
        lambda params: torch.optim.Adam(params, differentiable=True),
        "with `differentiable=True` a gradient flows through its step, but not through an exchange of weights",
        NO_CLAIM,
    ),
    "zero": (_zero, "it divides its state by itself", NO_CLAIM),
}


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in [(16, 8), (16,), (4, 16), (4,)]]


@for_each("name", BY_ELEMENTS)
def test_what_works_element_by_element_is_divided_by_elements(name: str) -> None:
    assert divides_by_elements(BY_ELEMENTS[name](params()), whole_parameters=False)
    assert not divides_by_elements(BY_ELEMENTS[name](params()), whole_parameters=True)


@for_each("name", BY_PARAMETERS)
def test_what_works_parameter_by_parameter_is_divided_by_parameters(name: str) -> None:
    for whole_parameters in (False, True):
        assert not divides_by_elements(BY_PARAMETERS[name](params()), whole_parameters=whole_parameters)


@for_each("name", REFUSED)
def test_all_others_are_refused_with_the_reason_and_what_helps(name: str) -> None:
    make, reason, remedy = REFUSED[name]
    optimizer = make(params())
    with pytest.raises(ValueError, match="cannot divide") as raised:
        divides_by_elements(optimizer, whole_parameters=False)
    assert str(raised.value) == (
        f"`shard_optimizer` cannot divide the state of `{type(optimizer).__name__}`: {reason}. {remedy}"
    )
    if remedy == NO_CLAIM or reason in (UNKNOWN, OVER_PARAMETERS):
        with pytest.raises(ValueError, match="cannot divide"):
            divides_by_elements(make(params()), whole_parameters=True)


def test_trying_leaves_nothing_behind() -> None:
    optimizer = claiming(LARS, claim="per_parameter")(params())
    hook_calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: hook_calls.append(1))
    before = [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]
    random = torch.get_rng_state()
    divides_by_elements(optimizer, whole_parameters=False)
    assert torch.equal(torch.get_rng_state(), random)
    after = [param.detach() for group in optimizer.param_groups for param in group["params"]]
    assert all(map(torch.equal, before, after))
    assert (dict(optimizer.state), hook_calls) == ({}, [])


# --- Through Lightning


class Module(models.Regression):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self._make = make

    def configure_optimizers(self) -> Any:
        return self._make(self.parameters())


@for_each("name", ["LAMB", "LAMB that claims parameters", "schedule-free"])
@on_ranks()
@like_torchrun()
def test_an_optimizer_is_refused_on_every_rank_before_training_begins(name: str) -> None:
    make, reason, _ = REFUSED[name]
    refused = rf"`shard_optimizer` cannot divide .*{re.escape(reason)}"
    with pytest.raises(ValueError, match=refused):
        make_trainer(BucketDDPStrategy(shard_optimizer=True), max_epochs=1).fit(Module(make), models.loader())
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=refused):
        fabrics.make_fabric(FabricStrategy(shard_optimizer=True)).setup(layer, make(layer.parameters()))
