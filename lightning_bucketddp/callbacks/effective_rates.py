"""The learning rates that one optimizer steps with, apart from those that schedulers see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass(slots=True)
class _AppliedRate:
    """A parameter group whose learning rate is multiplied at the moment."""

    group: dict[str, Any]
    scheduled: float | Tensor
    effective: float | Tensor

    def is_untouched(self) -> bool:
        # A tensor is changed in place; looking at it would make the host wait for the device.
        return self.group["lr"] is self.effective


class EffectiveRates:
    """Multiplies the learning rates of `optimizer` while it steps, and puts them back after.

    Schedulers compute the next learning rate from the last one, from the first one, or from numbers of their own. It
    does not matter which, because none of them, and no checkpoint, ever sees a multiplied one.

    Args:
        optimizer: whose learning rates these are.
        multiplier: by what, for the step with this number.
        num_steps: how many steps it has made.
    """

    def __init__(self, optimizer: Optimizer, multiplier: Callable[[int], float], *, num_steps: int) -> None:
        self.num_steps = num_steps
        self._optimizer = optimizer
        self._multiplier = multiplier
        self._applied: list[_AppliedRate] = []
        self._depth = 0
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._as_scheduled),
        ]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Show the learning rates of the next step."""
        self._apply()
        try:
            yield
        finally:
            self._restore()

    def follow(self) -> None:
        """Within a step, multiply what somebody has set since it began: `training_step` is part of it."""
        if self._applied:
            self._apply()

    def close(self) -> None:
        """Leave the optimizer alone."""
        self._restore()
        while self._handles:
            self._handles.pop().remove()

    def begin_batch(self) -> None:
        """No step is being made, even if the last one has raised."""
        self._depth = 0

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # torch calls the hooks again for a `step` that calls the `step` of its base class.
        self._depth += 1
        if self._depth == 1:
            self._apply()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._restore()
            self.num_steps += 1

    def _apply(self) -> None:
        self._restore()  # a step that raised has not
        multiplier = self._multiplier(self.num_steps)
        for group in self._optimizer.param_groups:
            scheduled = group["lr"]
            if isinstance(scheduled, Tensor):
                # In place: a captured or compiled step knows the tensor, not the group.
                applied = _AppliedRate(group, scheduled.clone(), scheduled)
                with torch.no_grad():
                    scheduled.mul_(multiplier)
            else:
                applied = _AppliedRate(group, scheduled, scheduled * multiplier)
                group["lr"] = applied.effective
            self._applied.append(applied)

    def _restore(self) -> None:
        while self._applied:
            rate = self._applied.pop()
            if not rate.is_untouched():
                continue
            if isinstance(rate.effective, Tensor) and isinstance(rate.scheduled, Tensor):
                with torch.no_grad():
                    rate.effective.copy_(rate.scheduled)
            else:
                rate.group["lr"] = rate.scheduled

    def _as_scheduled(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """A checkpoint may be asked for within a step, by a signal."""
        for rate, saved in zip(self._applied, state_dict["param_groups"], strict=False):
            if rate.is_untouched():
                saved["lr"] = rate.scheduled
