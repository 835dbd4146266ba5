"""The state of a communication hook in a checkpoint.

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
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_bucketddp.checkpoint.rank_state import (
    from_plain,
    gather_to_rank_zero,
    holds_tensors,
    is_plain,
    plain_entries,
)
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.wording import pluralize


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
