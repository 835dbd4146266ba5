"""State that each rank has of its own, gathered to rank zero for the checkpoint: random numbers, and that of hooks."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.processes import rank_zero_info, rank_zero_warn
from lightning_bucketddp.wording import list_ranks, list_some, list_some_ranks, pluralize

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

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
        plain = {}
        for key, item in value.items():
            if type(key) in (bool, int, float, str):
                with suppress(NotPlainError):
                    plain[key] = to_plain(item)
        return plain
    if type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided:
        tensor = value.detach()
        return tensor if tensor.device.type == "cpu" else {_KIND: "tensor on the accelerator", "tensor": tensor}
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is np.ndarray and value.dtype.kind in "biufc":
        # As bytes: torch has no tensors of some dtypes, and old versions cannot save all that it has.
        raw = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.size else torch.empty(0).byte()
        return {_KIND: "numpy array", "dtype": value.dtype.str, "shape": list(value.shape), "bytes": raw}
    if type(value) is np.random.RandomState:
        return {_KIND: "numpy.random.RandomState", "state": _plain_numpy_state(value.get_state(legacy=True))}
    if type(value) is torch.Generator and value.device.type == "cpu":
        return {_KIND: "torch.Generator", "state": value.get_state().tolist()}
    raise NotPlainError(type(value).__name__)


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


def gather_to_rank_zero(tree: Any, collectives: Collectives | None) -> list[Any] | None:
    """Return `tree` of every rank, by rank, on rank zero; None on the others. All ranks must call this.

    It consists of dicts, lists and tuples of dense tensors, numbers, strings and None. Tensors travel one by one and
    arrive in host memory: together they may be larger than the memory of a device. They are copies, so that a
    checkpoint can be written while training goes on. `collectives` is None when there are no other ranks.
    """

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True)

    if collectives is None:
        return [apply_to_collection(tree, Tensor, copy)]
    device = collectives.device
    # An outline has tensors on "meta", without content: rank zero learns their shapes and dtypes from it.
    buffer = io.BytesIO()
    torch.save(apply_to_collection(tree, Tensor, lambda tensor: tensor.detach().to("meta")), buffer)
    outlines = collectives.gather_rows(torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).to(device))
    if collectives.rank != 0:
        apply_to_collection(tree, Tensor, lambda it: collectives.send(it.detach().to(device), destination=0))
        return None

    def receive(outline: Tensor, *, source: int) -> Tensor:
        tensor = torch.empty(outline.shape, dtype=outline.dtype, device=device)
        collectives.receive(tensor, source=source)
        # Keep the strides that the sender has.
        return torch.empty_like(outline, device="cpu").copy_(tensor)

    by_rank = [apply_to_collection(tree, Tensor, copy)]
    for source, raw in enumerate(outlines[1:], start=1):
        # What comes from another process is data, never code.
        outline = torch.load(io.BytesIO(bytes(raw.tolist())), weights_only=True)
        by_rank.append(apply_to_collection(outline, Tensor, receive, source=source))
    return by_rank


@dataclass(frozen=True, slots=True)
class HookState:
    """The state that a user gave to a communication hook.

    One that has `state_dict()` and `load_state_dict()` is asked. Of any other its attributes are saved (its items, if
    it is a dict) as far as they are plain data; the others (process groups, functions) stay those of the program.
    Tensors belong to one rank and to buckets by their index: with another number of ranks, other parameters or another
    `bucket_cap_mb` only what all ranks had in common and what holds no tensor comes back.
    """

    state: Any
    layout: str  # what `bucket_layout` returns
    collectives: Collectives | None  # None when there are no other ranks

    def gather(self) -> dict[str, Any] | None:
        """Return what goes into the checkpoint, on rank zero; None on the other ranks. All ranks must call this."""
        by_rank = gather_to_rank_zero(to_plain(self._entries()), self.collectives)
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

    @property
    def _has_state_dict(self) -> bool:
        return hasattr(self.state, "state_dict") and hasattr(self.state, "load_state_dict")

    def _entries(self) -> dict[Any, Any]:
        if self._has_state_dict:
            return dict(self.state.state_dict())
        if isinstance(self.state, dict):
            return dict(self.state)
        # Not by `__getstate__`: PowerSGD's logs a warning each time, and its `__setstate__` forgets the process group.
        slots = [vars(cls).get("__slots__", ()) for cls in type(self.state).__mro__]
        names = [name for of_class in slots for name in ([of_class] if isinstance(of_class, str) else of_class)]
        entries = {it: getattr(self.state, it) for it in names if not it.startswith("__") and hasattr(self.state, it)}
        return {**entries, **getattr(self.state, "__dict__", {})}

    def _replace(self, entries: dict[Any, Any]) -> None:
        present = self._entries()
        if self._has_state_dict:
            self.state.load_state_dict({**present, **entries})
            return
        # What is not plain now (a process group) was given by the program for this run.
        plain = to_plain({key: present.get(key) for key in entries})
        for key, value in entries.items():
            if key not in plain:
                continue
            if isinstance(self.state, dict):
                self.state[key] = value
            elif key in present or hasattr(self.state, "__dict__"):
                setattr(self.state, key, value)


def bucket_layout(parameters: Mapping[str, Tensor], config: ReducerConfig) -> str:
    """Return a hash that is equal for runs whose buckets have the same members, as far as known before a backward."""
    described = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in parameters.items()]
    return hashlib.sha256(json.dumps([described, config.caps.by_position, config.caps.last]).encode()).hexdigest()


def _common(by_rank: list[dict[Any, Any]]) -> dict[Any, Any]:
    """Return the entries that hold no tensor and are equal on all ranks."""

    def without_tensors(entries: dict[Any, Any]) -> dict[Any, Any]:
        found: dict[Any, list[Tensor]] = {key: [] for key in entries}
        for key, value in entries.items():
            apply_to_collection(value, Tensor, found[key].append)
        return {key: value for key, value in entries.items() if not found[key]}

    first, *others = map(without_tensors, by_rank)
    return {k: value for k, value in first.items() if all(k in other and other[k] == value for other in others)}


class RankSeeds:
    """Gives each rank a random stream of its own when training begins: Python's, numpy's, torch's and CUDA's.

    Weights are shared before that, and distributed samplers have a seed of their own, so both stay equal on all ranks.
    """

    def __init__(self) -> None:
        self._checkpoint: dict[str, Any] | None = None
        self._resumed_from: dict[str, Any] | None = None
        # Until the first batch. A run that resumes from a checkpoint of before creates the iterators again, which draw.
        self._at_start: dict[str, Any] | None = None

    def take_from(self, checkpoint: dict[str, Any]) -> None:
        """Remember the random states in a checkpoint, for the training that may begin with it."""
        saved = checkpoint.get("bucketddp", {}).get("rank_seeds", {})
        self._checkpoint = {"global_step": checkpoint.get("global_step", 0), **saved}

    def forget_checkpoint(self) -> None:
        """Forget the checkpoint that was loaded: another run begins."""
        self._checkpoint = None

    def begin(self, *, step: int, collectives: Collectives, device: torch.device) -> None:
        """Start this rank's stream: where the checkpoint has left it, else a new one. All ranks must call this."""
        saved, self._checkpoint = self._checkpoint, None
        # Either all ranks have saved their states, or one has saved its own alone.
        held = {} if saved is None else dict(enumerate(saved.get("states", []), start=saved.get("saved_by", 0)))
        num_ranks = len(held) if saved is None else saved.get("world_size", len(held))
        states = held if num_ranks == collectives.world_size else {}
        seeds = self._split(step if saved is None else saved["global_step"], collectives, except_for=states)
        self._resumed_from = states.get(collectives.rank)
        if self._resumed_from is not None:
            set_random_state(self._resumed_from, device)
        self._at_start = random_state(device)
        if saved is None:
            rank_zero_info(f"bucketddp: rank_seeds: {seeds}.")
        elif len(states) == collectives.world_size:
            rank_zero_info("bucketddp: rank_seeds: every rank goes on with its random numbers from the checkpoint.")
        elif states:
            failed, saver = saved["failed_rank"], list_ranks(list(states))
            why = "the others could not be reached any more" if failed is None else f"rank {failed} had failed"
            missing = [rank for rank in range(num_ranks) if rank not in states]
            rank_zero_warn(
                f"bucketddp: rank_seeds: {saver} saved the checkpoint alone, because {why}. The random state of"
                f" {list_some_ranks(missing)} is not in it, so new random numbers begin there, {seeds}; {saver} goes on"
                " where it was."
            )
        else:
            what = f"is from {num_ranks} rank(s)" if held else "holds no random states"
            rank_zero_warn(
                f"bucketddp: rank_seeds: the checkpoint {what} and this run has {collectives.world_size}, so random"
                f" numbers do not go on where they were. New ones: {seeds}."
            )

    def continue_after_start(self, trainer: Trainer, device: torch.device) -> None:
        """Undo, before the first batch, what Lightning has drawn since `begin` and an uninterrupted run had not.

        Creating iterators draws random numbers. A run that was not interrupted creates them at the beginning of each
        epoch, after the checkpoint; a resumed one before `on_train_start` in any case, and later again or not.
        """
        loop: Any = trainer.fit_loop
        progress = loop.epoch_progress.current
        is_between_epochs = progress.processed == progress.started
        # The condition of Lightning's epoch loop; it has no `is_resuming` before 2.6.
        creates_again = trainer.current_epoch > 0 and not (loop.restarting or getattr(loop, "is_resuming", False))
        if self._resumed_from is not None and (creates_again or not is_between_epochs):
            set_random_state(self._resumed_from, device)
        self._resumed_from = self._at_start = None

    def gather(
        self, collectives: Collectives | None, device: torch.device, state: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return what goes into the checkpoint, on rank zero: `state`, or that of now.

        All ranks must call this. `collectives` is None when there are no others.
        """
        return {"states": gather_to_rank_zero(self._at_start or state or random_state(device), collectives)}

    def _split(self, step: int, collectives: Collectives, *, except_for: Mapping[int, Any]) -> str:
        """Seed this rank by its number; return what all ranks get, in words, but for those that have a state."""
        # `seed_everything` sets the variable in every process; without it each process has a seed from the system.
        base = collectives.broadcast_json(int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())))
        names = [f"{base}/{rank}/{step}".encode() for rank in range(collectives.world_size)]
        seeds = [int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1 for name in names]
        seed = seeds[collectives.rank]
        torch.manual_seed(seed)  # CUDA too
        # Neither from the bare number: both would turn it into the same state.
        random.seed(f"python {seed}")
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        shown = list_some([f"{seed} on rank {rank}" for rank, seed in enumerate(seeds) if rank not in except_for])
        return f"from seed {base} and step {step}: {shown}"


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this process's generators, as plain data."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": _plain_numpy_state(np.random.get_state(legacy=True)),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Have this process's generators go on from `state`."""
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _plain_numpy_state(state: Any) -> list[Any]:
    name, keys, *rest = state
    return [str(name), keys.tolist(), *rest]
