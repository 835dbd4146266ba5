"""State that each rank has of its own, communication hooks' too, gathered to rank zero for the checkpoint.

Note: what is kept
    A state that has `state_dict()` and `load_state_dict()` is asked. Of any other state its attributes are taken (its
    items, if it is a dict) as far as they are plain data: numbers, strings, tensors, numpy arrays, random number
    generators, and lists, tuples and dicts of them. Process groups, functions and other objects are left out, and are
    what the program has given when training resumes.

Note: another number of ranks
    Tensors in a state belong to one rank (the error that PowerSGD still owes) and to buckets by their index. With
    another number of ranks, other parameters or another `bucket_cap_mb` they mean nothing. Then only what all ranks
    had in common and what holds no tensor comes back: the iteration, the random numbers.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.wording import pluralize

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


@dataclass(frozen=True, slots=True)
class HookState:
    """The state that a user gave to a communication hook.

    Args:
        layout: identifies what the hook's buckets are made of (see `bucket_layout`).
        collectives: None when there are no other ranks.
    """

    state: object
    layout: str
    collectives: Collectives | None

    def gather(self) -> dict[str, Any] | None:
        """Return what goes into the checkpoint, on rank zero; None on the other ranks. All ranks must call this."""
        by_rank = gather_to_rank_zero(plain_entries(self._entries()), self.collectives)
        return None if by_rank is None else {"layout": self.layout, "by_rank": by_rank}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Put what this rank has saved back into the user's object."""
        by_rank = saved["by_rank"]
        rank, world_size = (0, 1) if self.collectives is None else (self.collectives.rank, self.collectives.world_size)
        device = torch.device("cpu") if self.collectives is None else self.collectives.device
        reason = ""
        if len(by_rank) != world_size:
            reason = f"it was saved by {pluralize(len(by_rank), 'rank')} and {pluralize(world_size, 'rank')} resume"
        elif saved["layout"] != self.layout:
            reason = "the trainable parameters or `bucket_cap_mb` are not those it was saved with"
        if reason:
            rank_zero_warn(
                f"bucketddp: the tensors in the communication hook's state (`{type(self.state).__name__}`) are not"
                f" restored, because {reason}. What all ranks had in common is restored: the hook starts again with"
                " empty memory at the iteration that was saved."
            )
        self._replace(from_plain(_common(by_rank) if reason else by_rank[rank], device))

    def _entries(self) -> dict[Any, Any]:
        if _has_state_dict(self.state):
            return dict(self.state.state_dict())  # type: ignore[attr-defined]
        return self.state if isinstance(self.state, dict) else _attributes(self.state)

    def _replace(self, entries: dict[Any, Any]) -> None:
        present = self._entries()
        if _has_state_dict(self.state):
            self.state.load_state_dict({**present, **entries})  # type: ignore[attr-defined]
            return
        # What is not plain now (a process group) was given by the program for this run.
        entries = {key: value for key, value in entries.items() if is_plain(present.get(key))}
        if isinstance(self.state, dict):
            self.state.update(entries)
            return
        for name, value in entries.items():
            if name in present or hasattr(self.state, "__dict__"):
                setattr(self.state, name, value)


def bucket_layout(parameters: Mapping[str, Tensor], config: ReducerConfig) -> str:
    """Return a hash that is equal for runs whose buckets have the same members, as far as known before a backward."""
    described = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in parameters.items()]
    return hashlib.sha256(json.dumps([described, config.caps.by_position, config.caps.last]).encode()).hexdigest()


def _common(by_rank: list[dict[Any, Any]]) -> dict[Any, Any]:
    first, *others = by_rank
    return {
        key: value
        for key, value in first.items()
        if not holds_tensors(value)
        and all(key in other and not holds_tensors(other[key]) and other[key] == value for other in others)
    }


def _has_state_dict(state: object) -> bool:
    return hasattr(state, "state_dict") and hasattr(state, "load_state_dict")


def _attributes(state: object) -> dict[str, Any]:
    # Not by `__getstate__`: PowerSGD's logs a warning each time, and its `__setstate__` forgets the process group.
    names = [name for cls in type(state).__mro__ for name in _slots(cls)]
    return {**{name: getattr(state, name) for name in names if hasattr(state, name)}, **getattr(state, "__dict__", {})}


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]
