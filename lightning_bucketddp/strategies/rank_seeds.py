"""What a resumed run continues with: random numbers of each rank, and the state before an unfinished batch."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_bucketddp.checkpoint.rank_state import from_plain, gather_to_rank_zero, to_plain
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.processes import rank_zero_info, rank_zero_warn
from lightning_bucketddp.wording import list_ranks, list_some, list_some_ranks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class RankSeeds:
    """Gives each rank a random stream of its own when training begins: Python's, numpy's, torch's and CUDA's.

    Weights are shared before that, and distributed samplers have a seed of their own, so both stay equal on all ranks.
    """

    def __init__(self) -> None:
        self._checkpoint: dict[str, Any] | None = None
        self._resumed_from: dict[str, Any] | None = None

    def take_from(self, checkpoint: dict[str, Any]) -> None:
        """Remember what a checkpoint says, for the training that may begin with it."""
        saved = checkpoint.get("bucketddp", {}).get("rank_seeds", {})
        self._checkpoint = {"global_step": checkpoint.get("global_step", 0), **saved}

    def forget_checkpoint(self) -> None:
        """Call when no training begins with the checkpoint that was loaded."""
        self._checkpoint = None

    def begin(self, *, step: int, collectives: Collectives, device: torch.device) -> None:
        """Start this rank's stream: where the checkpoint has left it, else a new one. All ranks must call this."""
        saved, self._checkpoint = self._checkpoint, None
        self._resumed_from = None
        # Of all ranks, or of the one that has saved alone.
        held = {} if saved is None else dict(enumerate(saved.get("states", []), start=saved.get("saved_by", 0)))
        num_ranks = len(held) if saved is None else saved.get("world_size", len(held))
        states = held if num_ranks == collectives.world_size else {}
        seeds = self._split(step if saved is None else saved["global_step"], collectives, except_for=states)
        if collectives.rank in states:
            self._resumed_from = from_plain(states[collectives.rank], torch.device("cpu"))
            set_random_state(self._resumed_from, device)
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
        """Call before the first batch: undo what Lightning has drawn since `begin` and an uninterrupted run had not."""
        if self._resumed_from is not None and not _has_begun_epoch(trainer.fit_loop):
            set_random_state(self._resumed_from, device)
        self._resumed_from = None

    def gather(self, collectives: Collectives | None, device: torch.device) -> dict[str, Any]:
        """Return what goes into the checkpoint, on rank zero. All ranks must call this; None: there are no others."""
        return {"states": gather_to_rank_zero(to_plain(random_state(device)), collectives)}

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


def _has_begun_epoch(fit_loop: Any) -> bool:
    """Return whether the first batch comes from the iterators that exist, and begins an epoch.

    Creating iterators draws random numbers. A run that was not interrupted creates them at the beginning of each epoch,
    after the checkpoint; a resumed one before `on_train_start` in any case, and later again or not.
    """
    progress = fit_loop.epoch_progress.current
    is_between_epochs = progress.processed == progress.started
    # The condition of Lightning's epoch loop; it has no `is_resuming` before 2.6.
    creates_again = not fit_loop.restarting and not getattr(fit_loop, "is_resuming", False)
    return is_between_epochs and not creates_again


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this process's generators."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Have this process's generators go on from `state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@dataclass(eq=False)
class UnfinishedBatch(RunPart):
    """Copies what changes before a step, and takes it back."""

    module: nn.Module
    device: torch.device | None  # has random numbers that checkpoints hold; None: they hold none
    counts: Callable[[], Any]  # Lightning's, of the batches of the epoch
    repeats_micro_batches: Callable[[], bool]  # whether a resumed run begins after the last step
    _random_state: dict[str, Any] | None = None
    _has_copies: bool = False  # since they were made there was no step
    _num_batches: int = 0  # of the epoch, with this one
    _has_seen_step: bool = False

    def __post_init__(self) -> None:
        # By the module that has it, and its name there: modules replace their buffers.
        self._places = [
            (owner, key)
            for owner in self.module.modules()
            for key, _ in owner.named_buffers(recurse=False)
            # A scripted module does not say which of its buffers it saves.
            if key not in getattr(owner, "_non_persistent_buffers_set", ())
        ]
        # By place: the buffer, as it was found last, and its copy.
        self._kept: dict[tuple[nn.Module, str], tuple[Tensor, Tensor]] = {}

    def begin_batch(self, batch_idx: int) -> None:
        self._num_batches = self.counts().ready
        is_after_micro_batch = self._has_copies and not self.repeats_micro_batches()
        if is_after_micro_batch or self._random_state is None:
            self._note_random_state()
        if is_after_micro_batch:
            self._has_copies = False

    @torch.no_grad()
    def before_forward(self) -> None:
        if self._has_copies:
            return
        by_kind: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        before, self._kept = self._kept, {}
        for place in self._places:
            buffer: Tensor | None = getattr(*place, None)
            if buffer is not None:
                known, copy = before.get(place, (None, None))
                if copy is None or known is not buffer or copy.shape != buffer.shape:
                    copy = torch.empty_like(buffer)
                self._kept[place] = buffer, copy
                copies, buffers = by_kind.setdefault((buffer.device, buffer.dtype), ([], []))
                copies.append(copy)
                buffers.append(buffer)
        for copies, buffers in by_kind.values():
            torch._foreach_copy_(copies, buffers)
        self._has_copies = True

    def complete_step(self) -> None:
        # What the batch has changed is to stay.
        self._has_copies = False
        self._has_seen_step = True
        self._note_random_state()

    def _note_random_state(self) -> None:
        # Before the next batch is loaded, which draws as well.
        if self.device is not None:
            self._random_state = random_state(self.device)

    def undo_if_repeated(self, *, is_automatic: bool) -> None:
        """Undo what a batch has changed that a resumed run will see again."""
        # With manual optimization the user may call optimizers that we do not see.
        if not self._has_copies or not (self._has_seen_step or is_automatic):
            return
        if self.repeats_micro_batches() or self.counts().completed < self._num_batches:
            self.undo()

    @torch.no_grad()
    def undo(self) -> None:
        """Give buffers and random numbers the state that they had before the batch."""
        for (owner, key), (buffer, copy) in self._kept.items():
            if getattr(owner, key, None) is buffer:
                buffer.copy_(copy)
            else:
                setattr(owner, key, copy.clone())
        if self._random_state is not None and self.device is not None:
            set_random_state(self._random_state, self.device)
        self._has_copies = False
