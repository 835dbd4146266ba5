"""Graphs that torch makes of a step: those that dynamo compiles, and those that CUDA captures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp.config import MIB, ReducerConfig


def is_being_captured(device: torch.device) -> bool:
    """Return whether work for `device` is captured now, instead of run.

    It runs later, without Python, again and again. So the plan is that of the moment, nothing is read back, and no
    event is recorded that the host asks for: there would be no host to act on it.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as one that dynamo does not look into; where it is not loaded, nothing is compiled so far."""
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function  # type: ignore[no-untyped-call]


# dynamo's first part has this size, and it refuses a smaller one for the others.
_SMALLEST_PART_BYTES = 1 * MIB


@dataclass(frozen=True, slots=True)
class _ForwardRunning:
    """What dynamo asks of a `DistributedDataParallel`: whether it is there, and the size of the parts."""

    bucket_bytes_cap: int

    def __bool__(self) -> bool:
        # A graph without a backward (a teacher, an evaluation) is faster in one part.
        return torch.is_grad_enabled()


@contextmanager
def graphs_split(config: ReducerConfig, *, world_size: int) -> Iterator[None]:
    """Split graphs that are compiled inside into parts whose gradients arrive one part after the other.

    A compiled graph hands over all its gradients when its backward ends, which leaves nothing to overlap with. dynamo
    splits it, if `torch._dynamo.config.optimize_ddp` says so, where a `DistributedDataParallel` runs its forward
    meanwhile: we answer in its place.
    """
    if world_size == 1 or not config.overlap:
        yield
        return
    cap = max(config.caps.by_position[-1], _SMALLEST_PART_BYTES)
    before = DistributedDataParallel._active_ddp_module
    DistributedDataParallel._active_ddp_module = _ForwardRunning(cap)  # type: ignore[assignment]
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = before
