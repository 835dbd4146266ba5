"""An optimizer's step that is not taken on any rank, because the gradients of some rank are not finite.

Note: where a step is withheld
    Lightning runs forward and backward in the closure that it gives to the optimizer, so that only the end of the
    closure tells whether a step may follow. An exception leads from there past optimizer, gradient clipping and
    `on_before_optimizer_step` back to the strategy: none of them has done anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_bucketddp.reducer.nonfinite import Finiteness


class StepWithheld(Exception):
    """Leads out of an optimizer's step (Note: where a step is withheld)."""


def withhold_nonfinite(optimizer: Optimizer, checks: Iterable[Finiteness]) -> None:
    """Raise `StepWithheld` if one of `checks` has seen that a gradient of `optimizer` is not finite on some rank."""
    # All are asked: each forgets what it is asked for.
    if any([check.withholds(optimizer) for check in checks]):  # noqa: C419
        raise StepWithheld


def drop_gradients(optimizer: Optimizer, precision: Any) -> None:
    """Leave nothing of a step that was withheld; `precision` is the plugin, which may have a GradScaler."""
    optimizer.zero_grad()
    if (scaler := scaler_of(precision)) is not None:
        # As it is: it only forgets that these gradients may have been unscaled already, for clipping.
        scaler.update(scaler.get_scale())


def scaler_of(precision: Any) -> torch.amp.GradScaler | None:
    """Return the GradScaler that is at work, if any: some precision plugins have one."""
    scaler: torch.amp.GradScaler | None = getattr(precision, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None
