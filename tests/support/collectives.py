"""Watching what is reduced, whoever does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor


@contextmanager
def each_all_reduce(act: Callable[[Tensor, Any], Any]) -> Iterator[None]:
    """Has `act` called with each tensor that is all-reduced, and with what was returned, which it may replace."""
    group_class: Any = dist.ProcessGroup
    original = vars(group_class)["allreduce"]

    def acting(group: Any, tensors: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        [tensor] = tensors
        return act(tensor, original(group, tensors, *args, **kwargs))

    group_class.allreduce = acting
    try:
        yield
    finally:
        group_class.allreduce = original


@contextmanager
def all_reduced() -> Iterator[list[Tensor]]:
    """The tensors that are all-reduced, in order."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor, work: Any) -> Any:
        tensors.append(tensor)
        return work

    with each_all_reduce(note):
        yield tensors
