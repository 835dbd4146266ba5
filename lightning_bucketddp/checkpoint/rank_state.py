"""State that each rank has of its own: as plain data, and gathered to rank zero for the checkpoint."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives

_KIND = "bucketddp_kind"


class NotPlainError(TypeError):
    """A value that a checkpoint cannot hold as plain data."""


def to_plain(value: Any) -> Any:
    """Return `value` as plain data, without entries of dicts that have no such form; else raise `NotPlainError`."""
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
    """Return the entries that have a plain form, in that form."""
    plain = {}
    for key, value in entries.items():
        if type(key) in (bool, int, float, str):
            with suppress(NotPlainError):
                plain[key] = to_plain(value)
    return plain


def is_plain(value: Any) -> bool:
    """Return whether `value` has a plain form."""
    return bool(plain_entries({"value": value}))


def from_plain(plain: Any, device: torch.device) -> Any:
    """Return what `to_plain` was given; tensors that were on an accelerator are put on `device`."""
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
    """Return whether there is a tensor or an array anywhere in plain data."""
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


def gather_to_rank_zero(tree: Any, collectives: Collectives | None) -> list[Any] | None:
    """Return `tree` of every rank, by rank, on rank zero; None on the others. All ranks must call this.

    Tensors travel one by one, to rank zero only, and are on the CPU there: together they may be larger than the memory
    of a device. They are copies, so that a checkpoint can be written while training goes on.

    Args:
        tree: dicts, lists and tuples of dense tensors, numbers, strings and None.
        collectives: None when there are no other ranks.
    """
    if collectives is None:
        return [_map_tensors(tree, _copy_to_cpu)]
    device = collectives.device
    # Tensors on "meta" have a shape and a dtype, and no content: they tell rank zero what to receive.
    outlines = collectives.gather_rows(_to_bytes(_map_tensors(tree, lambda tensor: tensor.to("meta")), device))
    if collectives.rank != 0:
        _map_tensors(tree, lambda tensor: collectives.send(tensor.to(device), destination=0))
        return None

    def receive(outline: Tensor, *, source: int) -> Tensor:
        tensor = torch.empty(outline.shape, dtype=outline.dtype, device=device)
        collectives.receive(tensor, source=source)
        # In the memory order that it has there.
        return (
            tensor.cpu()
            if tensor.stride() == outline.stride()
            else torch.empty_like(outline, device="cpu").copy_(tensor)
        )

    others = enumerate(outlines[1:], start=1)
    received = [_map_tensors(_from_bytes(raw), partial(receive, source=source)) for source, raw in others]
    return [_map_tensors(tree, _copy_to_cpu), *received]


def _map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return `tree` with `function` called on each tensor, always in the same order."""
    if isinstance(tree, Tensor):
        return function(tree.detach())
    if type(tree) is dict:
        return {key: _map_tensors(value, function) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([_map_tensors(value, function) for value in tree])
    return tree


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


def _to_bytes(outline: Any, device: torch.device) -> Tensor:
    buffer = io.BytesIO()
    torch.save(outline, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(device)


def _from_bytes(raw: Tensor) -> Any:
    # What comes from another process is data, never code.
    return torch.load(io.BytesIO(bytes(raw.tolist())), weights_only=True)
