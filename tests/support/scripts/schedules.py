"""Every way in which a module can say its learning rates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

from tests.support.scripts import models

# Small, and powers of two times it stay exact.
RATE = 2.0**-6


# Once an Adam was made, torch calls the hooks of a subclass twice: around its `step` and around that of Adam within.
torch.optim.Adam([torch.zeros(1)])


class Recording(torch.optim.Adam):
    """Writes down the learning rates that it steps with."""

    def __init__(self, params: Any, lr: Any, used: list[Any]) -> None:
        super().__init__(params, lr, foreach=False)
        self.used = used
        self.tensors: list[Tensor] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        output = super().step(closure)
        self.used.append([float(group["lr"]) for group in self.param_groups])
        for rate in (group["lr"] for group in self.param_groups):
            if isinstance(rate, Tensor) and not any(rate is tensor for tensor in self.tensors):
                self.tensors.append(rate)
        return output


class Scheduled(models.Regression):
    """Has the optimizers and schedulers that a function gives it."""

    def __init__(self, configure: Callable[[Scheduled], Any], used: list[Any]) -> None:
        super().__init__()
        self._configure = configure
        self.used = used

    def optimizer(self, lr: Any = RATE, params: Any = None) -> Recording:
        return Recording(self.parameters() if params is None else params, lr, self.used)

    def groups(self) -> list[Any]:
        return [
            {"params": self.layers[0].parameters(), "lr": RATE},
            {"params": self.layers[2].parameters(), "lr": RATE / 2},
        ]

    def configure_optimizers(self) -> Any:
        return self._configure(self)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.log("constant", 1.0)  # on a plateau from the start
        return self.loss(batch)


class Manual(Scheduled):
    """Two optimizers, of which the second steps twice; steps the schedulers by itself."""

    def __init__(self, configure: Callable[[Scheduled], Any], used: list[Any]) -> None:
        super().__init__(configure, used)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        schedulers: Any = self.lr_schedulers()
        first, second = optimizers
        for optimizer in (first, second, second):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


class SetsItsOwn(Scheduled):
    """Sets the learning rate of each step by itself, without a scheduler."""

    def __init__(self, where: str, used: list[Any]) -> None:
        super().__init__(lambda module: module.optimizer(), used)
        self._where = where

    def _set(self, where: str) -> None:
        if where == self._where:
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] = RATE * 0.5**self.global_step

    def on_train_batch_start(self, *_: Any) -> None:
        self._set("on_train_batch_start")

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self._set("training_step")
        return super().training_step(batch)


def _each(interval: str, scheduler: Callable[..., Any], frequency: int = 1, **options: Any) -> Any:
    def configure(module: Scheduled) -> Any:
        optimizer = module.optimizer()
        config = {"scheduler": scheduler(optimizer, **options), "interval": interval, "frequency": frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}

    return configure


def _two_lists(module: Scheduled) -> Any:
    optimizer = module.optimizer()
    return [optimizer], [lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def _bare_scheduler(module: Scheduled) -> Any:
    optimizer = module.optimizer()
    return {"optimizer": optimizer, "lr_scheduler": lr_scheduler.CosineAnnealingLR(optimizer, 3, eta_min=RATE / 4)}


def _plateau(module: Scheduled) -> Any:
    optimizer = module.optimizer()
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, min_lr=RATE / 50)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": plateau, "interval": "step", "monitor": "constant"},
    }


def _sequential(optimizer: Optimizer) -> Any:
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(
        optimizer, [warmup, lr_scheduler.CosineAnnealingLR(optimizer, 20, eta_min=RATE / 9)], milestones=[3]
    )


def _chained(optimizer: Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


def _groups(module: Scheduled) -> Any:
    optimizer = module.optimizer(params=module.groups())
    scheduler = lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1 / (1 + step)])
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _tensor(module: Scheduled) -> Any:
    optimizer = module.optimizer(lr=torch.tensor(RATE))
    return [optimizer], [{"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}]


def _two_optimizers(module: Scheduled) -> Any:
    optimizers = [module.optimizer(), module.optimizer(lr=RATE / 8)]
    return [
        {"optimizer": optimizers[0], "lr_scheduler": lr_scheduler.ExponentialLR(optimizers[0], 0.9)},
        {"optimizer": optimizers[1], "lr_scheduler": {"scheduler": lr_scheduler.StepLR(optimizers[1], 3)}},
    ]


SCHEDULES: dict[str, Callable[[list[Any]], Scheduled]] = {
    "optimizer": partial(Scheduled, lambda module: module.optimizer()),
    "list": partial(Scheduled, lambda module: [module.optimizer()]),
    "two_lists": partial(Scheduled, _two_lists),
    "bare_scheduler": partial(Scheduled, _bare_scheduler),
    "step": partial(Scheduled, _each("step", lr_scheduler.StepLR, step_size=4, gamma=0.5)),
    "frequency": partial(Scheduled, _each("step", lr_scheduler.ExponentialLR, 3, gamma=0.8)),
    "plateau": partial(Scheduled, _plateau),
    "sequential": partial(Scheduled, _each("step", _sequential)),
    "chained": partial(Scheduled, _each("step", _chained)),
    "one_cycle": partial(Scheduled, _each("step", lr_scheduler.OneCycleLR, max_lr=RATE, total_steps=40)),
    "cyclic": partial(
        Scheduled,
        _each("step", lr_scheduler.CyclicLR, base_lr=RATE, max_lr=3 * RATE, step_size_up=3, cycle_momentum=False),
    ),
    "polynomial": partial(Scheduled, _each("step", lr_scheduler.PolynomialLR, total_iters=30)),
    "groups": partial(Scheduled, _groups),
    "tensor": partial(Scheduled, _tensor),
    "two_optimizers": partial(Manual, _two_optimizers),
    "set_before_the_step": partial(SetsItsOwn, "on_train_batch_start"),
    "set_within_the_step": partial(SetsItsOwn, "training_step"),
}
