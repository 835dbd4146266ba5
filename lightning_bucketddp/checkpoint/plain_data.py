"""Values as tensors, numbers, strings and containers of them: what `torch.load(weights_only=True)` takes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

_KIND = "bucketddp_kind"


class NotPlainError(TypeError):
    """A value that a checkpoint cannot hold as plain data."""


def to_plain(value: Any) -> Any:
    """`value` as plain data; raises `NotPlainError` for what has no such form.

    An entry of a dict that has none is left out.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return type(value)([to_plain(item) for item in value])
    if type(value) is dict:
        return plain_entries(value)
    if type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided:
        tensor = value.detach()
        return tensor if tensor.device.type == "cpu" else {_KIND: "tensor on the accelerator", "tensor": tensor}
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is np.ndarray:
        return {_KIND: "numpy array", "dtype": value.dtype.str, "shape": list(value.shape), "bytes": _bytes_of(value)}
    if type(value) is np.random.RandomState:
        name, keys, *rest = value.get_state(legacy=True)
        return {_KIND: "numpy.random.RandomState", "state": [str(name), np.asarray(keys).tolist(), *rest]}
    if type(value) is torch.Generator and value.device.type == "cpu":
        return {_KIND: "torch.Generator", "state": value.get_state().tolist()}
    raise NotPlainError(type(value).__name__)


def plain_entries(entries: dict[Any, Any]) -> dict[Any, Any]:
    """The entries that have a plain form."""
    plain = {}
    for key, value in entries.items():
        if type(key) in (bool, int, float, str):
            with suppress(NotPlainError):
                plain[key] = to_plain(value)
    return plain


def is_plain(value: Any) -> bool:
    """Whether `value` has a plain form."""
    return bool(plain_entries({"value": value}))


def from_plain(plain: Any, device: torch.device) -> Any:
    """What `to_plain` was given; tensors that were on an accelerator are put on `device`."""
    if type(plain) in (list, tuple):
        return type(plain)([from_plain(item, device) for item in plain])
    if type(plain) is not dict:
        return plain
    kind = plain.get(_KIND)
    if kind == "tensor on the accelerator":
        return plain["tensor"].to(device)
    if kind == "numpy array":
        return plain["bytes"].numpy().copy().view(plain["dtype"]).reshape(plain["shape"])
    if kind == "numpy.random.RandomState":
        generator = np.random.RandomState()
        generator.set_state(tuple(plain["state"]))
        return generator
    if kind == "torch.Generator":
        return torch.Generator().set_state(torch.tensor(plain["state"], dtype=torch.uint8))
    return {key: from_plain(value, device) for key, value in plain.items()}


def holds_tensors(plain: Any) -> bool:
    """Whether there is a tensor or an array anywhere in plain data."""
    if type(plain) is dict:
        return any(holds_tensors(value) for value in plain.values())
    if type(plain) in (list, tuple):
        return any(holds_tensors(value) for value in plain)
    return isinstance(plain, Tensor)


def _bytes_of(array: np.ndarray[Any, Any]) -> Tensor:
    # Not as numbers: torch has no tensors of some dtypes, and old ones cannot save all that it has.
    if array.dtype.kind not in "biufc":
        raise NotPlainError(f"array of {array.dtype}")
    return torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) if array.size else torch.empty(0).byte()
