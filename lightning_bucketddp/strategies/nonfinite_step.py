"""An optimizer's step that is not taken on any rank, because the gradients of some rank are not finite.

Note: where a step is withheld
    Lightning runs forward and backward in the closure that it gives to the optimizer, so that only the end of the
    closure tells whether a step may follow. An exception leads from there past optimizer, gradient clipping and
    `on_before_optimizer_step` back to the strategy: none of them has done anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_bucketddp.reducer.nonfinite import Finiteness


class _Withheld(Exception):
    """Leads out of an optimizer's step."""


def step_unless_withheld(
    step: Callable[[Callable[[], Any]], Any],
    optimizer: Optimizer,
    checks: Iterable[Finiteness],
    *,
    closure: Callable[[], Any],
    precision: Any,
) -> Any:
    """Take a step, unless what its closure has computed is not finite; None then.

    Args:
        step: takes the step; calls the closure that it is given before it changes anything.
        optimizer: whose step it is.
        checks: those that may have seen something.
        closure: computes the gradients, unless they are there already.
        precision: the plugin, which may have a GradScaler.
    """

    def closure_or_withheld() -> Any:
        result = closure()
        # All are asked: each forgets what it is asked for.
        if any([check.withholds(optimizer) for check in checks]):  # noqa: C419
            raise _Withheld
        return result

    try:
        return step(closure_or_withheld)
    except _Withheld:
        optimizer.zero_grad()
        if (scaler := scaler_of(precision)) is not None:
            # As it is: it only forgets that these gradients may have been unscaled already, for clipping.
            scaler.update(scaler.get_scale())
        return None


def scaler_of(precision: Any) -> torch.amp.GradScaler | None:
    """The GradScaler that is at work, if any: some precision plugins have one."""
    scaler: torch.amp.GradScaler | None = getattr(precision, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None
