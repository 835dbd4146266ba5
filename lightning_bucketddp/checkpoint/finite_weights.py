"""Weights that are worth keeping: none of them infinite or nan.

Note: what counts as a weight
    Parameters, and the running statistics of normalisation layers, which a nan in one batch makes nan for ever. Other
    buffers may hold infinities on purpose: attention masks, best values so far.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_bucketddp.checkpoint.errors import CheckpointWriteError

_STATISTICS = ("running_mean", "running_var")


def check_weights(
    state_dict: Mapping[str, Any], module: nn.Module, *, path: str | os.PathLike[str], refuses: bool
) -> None:
    """Warn, or refuse to write, if weights of `module` are not finite in the state dict that goes to `path`."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    names = [
        name
        for name, value in state_dict.items()
        if (name in parameters or name.rpartition(".")[2] in _STATISTICS) and not _is_finite(value)
    ]
    if not names:
        return
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    which = f"not finite: {', '.join(f'`{name}`' for name in names[:3])}{more}"
    if refuses:
        raise CheckpointWriteError(
            f"Checkpoint `{path}` is not written, because weights are {which}. Earlier ones are untouched: resume"
            " from one of them."
        )
    rank_zero_warn(
        f"bucketddp: weights in checkpoint `{path}` are {which}. It is written, but training cannot go on from it: keep"
        " an earlier one. With `on_nonfinite='raise'` or `on_nonfinite='skip'` it would not be written."
    )


def _is_finite(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.numel() == 0:
        return True
    value = torch.view_as_real(value) if value.is_complex() else value
    if not value.is_floating_point():
        return True
    # One pass, several times faster than `isfinite`.
    low, high = value.detach().aminmax()
    return bool(low.isfinite() & high.isfinite())
