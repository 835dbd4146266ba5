"""What every rank has of its own, brought together on rank zero for the checkpoint."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives

# Stands for a tensor that travels on its own, in a dict with its shape and dtype.
_SLOT = "bucketddp_tensor"


def gather_to_rank_zero(tree: Any, collectives: Collectives | None) -> list[Any] | None:
    """`tree` of every rank, by rank, on rank zero; None on the others. All ranks must call this.

    Tensors travel one by one, to rank zero only, and are on the CPU there: together they may be larger than the memory
    of a device. They are copies, so that a checkpoint can be written while training goes on.

    Args:
        tree: dicts, lists and tuples of dense tensors, numbers, strings and None.
        collectives: None when there are no other ranks.
    """
    tensors: list[Tensor] = []
    outline = _map(tree, _is_tensor, lambda tensor: _taken_out(tensor, tensors))
    if collectives is None:
        return [_with_tensors(outline, (_copy_on_cpu(tensor) for tensor in tensors))]
    outlines = collectives.gather_rows(_to_bytes(outline, collectives.device))
    if collectives.rank != 0:
        for tensor in tensors:
            collectives.send(tensor.detach().to(collectives.device), destination=0)
        return None
    gathered = [_with_tensors(outline, (_copy_on_cpu(tensor) for tensor in tensors))]
    for source in range(1, collectives.world_size):
        outline = _from_bytes(outlines[source])
        gathered.append(_with_tensors(outline, _received(outline, source, collectives)))
    return gathered


def _received(outline: Any, source: int, collectives: Collectives) -> Iterator[Tensor]:
    slots: list[dict[str, Any]] = []
    _map(outline, _is_slot, slots.append)
    for slot in slots:
        tensor = torch.empty(slot["shape"], dtype=slot["dtype"], device=collectives.device)
        collectives.receive(tensor, source=source)
        yield tensor.cpu()


def _with_tensors(outline: Any, tensors: Iterator[Tensor]) -> Any:
    return _map(outline, _is_slot, lambda _: next(tensors))


def _taken_out(tensor: Tensor, tensors: list[Tensor]) -> dict[str, Any]:
    tensors.append(tensor)
    return {_SLOT: True, "shape": tensor.shape, "dtype": tensor.dtype}


def _map(tree: Any, matches: Callable[[Any], bool], replace: Callable[[Any], Any]) -> Any:
    """`tree` with what `matches` replaced, always in the same order."""
    if matches(tree):
        return replace(tree)
    if type(tree) is dict:
        return {key: _map(value, matches, replace) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([_map(value, matches, replace) for value in tree])
    return tree


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_slot(value: Any) -> bool:
    return type(value) is dict and _SLOT in value


def _copy_on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _to_bytes(outline: Any, device: torch.device) -> Tensor:
    buffer = io.BytesIO()
    torch.save(outline, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(device)


def _from_bytes(raw: Tensor) -> Any:
    # What comes from another process is data, never code.
    return torch.load(io.BytesIO(bytes(raw.tolist())), weights_only=True)
