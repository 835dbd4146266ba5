"""Jobs that train with Fabric, with whatever strategy they are given."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp.bindings.registration import strategy_class

NUM_STEPS = 6
ROOTS = ["lightning.fabric", "lightning_fabric"]


def make_fabric(strategy: Any, *, root: str = ROOTS[0], **options: Any) -> Any:
    fabric_class = importlib.import_module(root).Fabric
    fabric = fabric_class(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **options)
    fabric.launch()
    return fabric


def strategy_of(root: str, **options: Any) -> Any:
    return strategy_class(root)(**options)


def _set_up(fabric: Any) -> tuple[Any, Any]:
    """A module with an optimizer; rank 0's weights are those that count."""
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    return fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))


def _loss(module: Callable[[Tensor], Tensor], step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    return module(torch.randn(4, 4, generator=generator)).square().mean()


def _weights(*modules: nn.Module) -> list[Any]:
    return [{name: value.tolist() for name, value in module.state_dict().items()} for module in modules]


def _backward(fabric: Any) -> list[Any]:
    module, optimizer = _set_up(fabric)
    for step in range(NUM_STEPS):
        _step(fabric, module, optimizer, step=step)
    return _weights(module)


def _accumulate(fabric: Any) -> list[Any]:
    module, optimizer = _set_up(fabric)
    for step in range(NUM_STEPS):
        is_last = step % 3 == 2
        with fabric.no_backward_sync(module, enabled=not is_last):
            fabric.backward(_loss(module, step))
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return _weights(module)


def _clip(fabric: Any, **limit: float) -> list[Any]:
    module, optimizer = _set_up(fabric)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        fabric.backward(_loss(module, step))
        fabric.clip_gradients(module, optimizer, **limit)
        optimizer.step()
    return _weights(module)


def _two_modules(fabric: Any) -> list[Any]:
    """A generator and a critic; the generator's loss goes through the critic too."""
    generator, generator_optimizer = _set_up(fabric)
    critic = nn.Linear(1, 1)
    critic, critic_optimizer = fabric.setup(critic, torch.optim.SGD(critic.parameters(), lr=0.01))
    for step in range(NUM_STEPS):
        critic_optimizer.zero_grad()
        fabric.backward(-_loss(lambda x: critic(generator(x).detach()), step))
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        fabric.backward(_loss(lambda x: critic(generator(x)), step))
        generator_optimizer.step()
    return _weights(generator, critic)


def _idle_rank(fabric: Any, *, uses_parameters: bool) -> list[Any]:
    """Rank 1 has a loss without any parameter in it, or the same said in a way that torch DDP accepts."""
    module, optimizer = _set_up(fabric)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        if fabric.global_rank == 0:
            loss = _loss(module, step)
        else:
            loss = 0 * _loss(module, step) if uses_parameters else torch.zeros((), requires_grad=True)
        fabric.backward(loss)
        optimizer.step()
    with torch.no_grad():
        module.eval()(torch.zeros(1, 4))  # shares the buffers
    return _weights(module)


class _Scaled(nn.Linear):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale.clone() * super().forward(x)


def _buffer_between_steps(fabric: Any) -> list[Any]:
    """Every rank changes its buffer in its own way between steps; what rank 0 made of it counts."""
    module = _Scaled()
    wrapped, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(NUM_STEPS):
        module.scale *= 0.9 + 0.5 * fabric.global_rank
        _step(fabric, wrapped, optimizer, step=step)
    return _weights(module)


def _compiled(fabric: Any) -> list[Any]:
    """Forwards that are compiled, with an evaluation between two steps."""
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    compiled = torch.compile(module, backend="aot_eager")
    wrapped, optimizer = fabric.setup(compiled, torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(NUM_STEPS):
        _step(fabric, wrapped, optimizer, step=step)
        if step == 2:
            with torch.no_grad():
                wrapped.eval()(torch.zeros(1, 4))
            wrapped.train()
    return _weights(module)


LOOPS: dict[str, Callable[[Any], list[Any]]] = {
    "backward": _backward,
    "no_backward_sync": _accumulate,
    "clip_norm": lambda fabric: _clip(fabric, max_norm=0.1),
    "clip_value": lambda fabric: _clip(fabric, clip_val=0.01),
    "two_modules": _two_modules,
    "buffer_between_steps": _buffer_between_steps,
    "compiled": _compiled,
    "idle_rank": lambda fabric: _idle_rank(fabric, uses_parameters=False),
    "zero_loss_on_one_rank": lambda fabric: _idle_rank(fabric, uses_parameters=True),
}


def _step(fabric: Any, module: Any, optimizer: Any, *, step: int) -> None:
    optimizer.zero_grad()
    fabric.backward(_loss(module, step))
    optimizer.step()


def save_and_load(*, saved_by: Any, loaded_by: Any, path: Path) -> tuple[list[Any], list[Any]]:
    """Save after a step, and load that with another strategy; the weights of both after one more step."""
    trained = []
    for strategy in (saved_by, loaded_by):
        fabric = make_fabric(strategy)
        module, optimizer = _set_up(fabric)
        state = {"module": module, "optimizer": optimizer, "step": 0}
        if strategy is loaded_by:
            fabric.load(path, state)
        else:
            _step(fabric, module, optimizer, step=0)
            fabric.save(path, {**state, "step": 1})
            state["step"] = 1
        _step(fabric, module, optimizer, step=state["step"])
        trained.append(_weights(module))
    return trained[0], trained[1]
