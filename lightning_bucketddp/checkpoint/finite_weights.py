"""Checkpoints whose weights are infinite or nan, and those that they must not replace.

Note: never in the place of a finite one
    A checkpoint with bad weights goes into a directory of its own, beside the path that was asked for. In the same
    directory whatever resumes by itself would take it for the newest, under any name. `ModelCheckpoint` removes a
    checkpoint as soon as it has saved the one that replaces it: if that one is not finite nothing is removed but others
    that are not finite. `ModelCheckpoint(save_last="link")` links to the path that it has asked for, so there must be
    something: a link to the newest finite checkpoint.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bucketddp.checkpoint.checkpoint_io import CheckpointWriteError
from lightning_bucketddp.wording import list_names, wrap

DIRECTORY = "nonfinite"
_STATISTICS = ("running_mean", "running_var")

# The worst value that is found in a weight, by name: a finite one, an infinity, a nan.
FINITE, INFINITE, NAN = range(3)
Severities = dict[str, int]
Path = str | os.PathLike[str]


def severities_of(module: nn.Module) -> Severities:
    """Return the worst value of each weight of `module`: of parameters, and of running statistics.

    Other buffers may hold infinities on purpose. A nan in optimizer state is in the weights, too, after the same step.
    """
    return _severities(_weights_of(module))


def nonfinite_weights(state_dict: Mapping[str, Any], module: nn.Module, *, at_start: Severities) -> list[str]:
    """Return the names of weights of `module` that are worse in `state_dict` than they were `at_start`."""
    weights = _weights_of(module).keys()
    now = _severities({name: value for name, value in state_dict.items() if name in weights})
    return [name for name in state_dict if now.get(name, FINITE) > at_start.get(name, FINITE)]


class FiniteCheckpoints:
    """Which checkpoints are finite, and where others go; on rank zero (Note: never in the place of a finite one)."""

    def __init__(self) -> None:
        # In the order in which they were saved; True: with all that training needs to go on.
        self._finite: dict[str, bool] = {}
        # By the path that was asked for: where it was written instead.
        self._beside: dict[str, str] = {}
        self._links: set[str] = set()
        self._is_nonfinite = False
        self._has_warned = False

    def add(self, path: Path, *, can_resume: bool) -> None:
        """Remember that the newest finite checkpoint is at `path`."""
        self._finite.pop(str(path), None)
        self._beside.pop(str(path), None)
        self._finite[str(path)] = can_resume
        self._is_nonfinite = self._has_warned = False

    def place(
        self, path: Path, nonfinite: list[str], *, refuses: bool, can_resume: bool = True, step: int | None = None
    ) -> Path:
        """Return where to write a checkpoint that was meant for `path`, and has these `nonfinite` weights.

        If it `refuses` those, it raises. One that `can_resume` has all that training needs to go on.
        """
        if not nonfinite:
            self.add(path, can_resume=can_resume)
            return path
        self._is_nonfinite = True
        newest = self._newest()
        if refuses:
            raise CheckpointWriteError(
                f"Checkpoint `{path}` is not written, because weights are not finite: {list_names(nonfinite)}. Earlier"
                f" ones are untouched: resume from {'one of them' if newest is None else f'`{newest}`'}."
            )
        directory, name = os.path.split(str(path))
        beside = self._beside[str(path)] = os.path.join(directory, DIRECTORY, name)
        if not self._has_warned:
            self._has_warned = True
            by_step = "" if step is None else f" by step {step}"
            advice = "No finite one is known." if newest is None else f"Resume from `{newest}`."
            text = (
                f"bucketddp: weights have become infinite or nan{by_step}: {list_names(nonfinite)}. Checkpoint `{path}`"
                f" is written as `{beside}`, and further ones likewise; earlier ones are neither replaced nor removed."
            )
            warnings.warn(wrap(f"{text} {advice}"), stacklevel=2)
        return beside

    def link(self, path: Path) -> None:
        """Link the local `path` of a checkpoint that was written beside it to the newest finite one, if any."""
        if not os.path.lexists(path):
            newest = self._newest()
            target = self._beside[str(path)] if newest is None else newest
            os.symlink(os.path.relpath(target, os.path.dirname(path)), path)
            self._links.add(str(path))

    def forget_warning(self) -> None:
        """Warn again of the next checkpoint with bad weights."""
        self._has_warned = False

    @contextmanager
    def known_unless_failing(self, path: Path) -> Iterator[None]:
        """Forget `path` if it cannot be written."""
        try:
            yield
        except BaseException:
            self._finite.pop(str(path), None)
            raise

    def path_to_remove(self, path: Path) -> str | None:
        """Return what to remove for the checkpoint that was to be saved to `path`; None: nothing."""
        if (beside := self._beside.pop(str(path), None)) is not None:
            if str(path) in self._links:
                self._links.remove(str(path))
                os.unlink(path)
            return beside
        if self._is_nonfinite:
            return None
        self._finite.pop(str(path), None)
        return str(path)

    def _newest(self) -> str | None:
        paths = list(self._finite)
        return next((path for path in reversed(paths) if self._finite[path]), paths[-1] if paths else None)


def _weights_of(module: nn.Module) -> dict[str, Tensor]:
    buffers = dict(module.named_buffers(remove_duplicate=False))
    statistics = {name: buffer for name, buffer in buffers.items() if name.rpartition(".")[2] in _STATISTICS}
    return {**dict(module.named_parameters(remove_duplicate=False)), **statistics}


def _severities(weights: Mapping[str, Any]) -> Severities:
    # Each tensor is read once, on its device; the host waits once for all of a kind.
    by_kind: dict[tuple[torch.device, torch.dtype], dict[str, tuple[Tensor, Tensor]]] = {}
    for name, weight in weights.items():
        if not isinstance(weight, Tensor) or weight.layout != torch.strided or weight.numel() == 0:
            continue
        numbers = torch.view_as_real(weight.detach()) if weight.is_complex() else weight.detach()
        if numbers.is_floating_point():
            # Several times faster than `isfinite`, and missing for 8 bits.
            low, high = (numbers.float() if numbers.itemsize == 1 else numbers).aminmax()
            by_kind.setdefault((low.device, low.dtype), {})[name] = (low, high)
    found: Severities = {}
    for of_kind in by_kind.values():
        extremes = torch.stack([torch.stack(pair) for pair in of_kind.values()]).tolist()
        for name, pair in zip(of_kind, extremes, strict=True):
            found[name] = NAN if any(map(math.isnan, pair)) else INFINITE if any(map(math.isinf, pair)) else FINITE
    return found
