"""What a resumed run continues with: random numbers of each rank, and the state before an unfinished batch."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Mapping
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


_LARGE_BYTES = 2**20


class UnfinishedBatch(RunPart):
    """Copies what changes before a step, and takes it back.

    Args:
        device: has random numbers that checkpoints hold; None: they hold none.
        counts: Lightning's counts of the batches of the epoch.
        repeats_micro_batches: whether a resumed run begins after the last step.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        device: torch.device | None,
        counts: Callable[[], Any],
        repeats_micro_batches: Callable[[], bool],
    ) -> None:
        self._buffers = [
            _Buffer(owner, key)
            for owner in module.modules()
            for key, _ in owner.named_buffers(recurse=False)
            # A scripted module does not say which of its buffers it saves.
            if key not in getattr(owner, "_non_persistent_buffers_set", ())
        ]
        self._device = device
        self._counts = counts
        self._repeats_micro_batches = repeats_micro_batches
        self._random_state: dict[str, Any] | None = None
        # Since the copies were made there was no step.
        self._has_copies = False
        # Of the epoch, with this one.
        self._num_batches = 0
        self._has_seen_step = False

    def begin_batch(self, batch_idx: int) -> None:
        self._num_batches = self._counts().ready
        is_after_micro_batch = self._has_copies and not self._repeats_micro_batches()
        if is_after_micro_batch or self._random_state is None:
            self._note_random_state()
        if is_after_micro_batch:
            self._has_copies = False

    @torch.no_grad()
    def before_forward(self) -> None:
        if self._has_copies:
            return
        by_kind: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for kept in self._buffers:
            if kept.is_due():
                buffer, copy = kept.pair()
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
        if self._device is not None:
            self._random_state = random_state(self._device)

    def undo_if_repeated(self, *, is_automatic: bool) -> None:
        """Undo what a batch has changed that a resumed run will see again."""
        # With manual optimization the user may call optimizers that we do not see.
        if not self._has_copies or not (self._has_seen_step or is_automatic):
            return
        if self._repeats_micro_batches() or self._counts().completed < self._num_batches:
            self.undo()

    @torch.no_grad()
    def undo(self) -> None:
        """Give buffers and random numbers the state that they had before the batch."""
        for kept in self._buffers:
            kept.restore()
        if self._random_state is not None and self._device is not None:
            set_random_state(self._random_state, self._device)
        self._has_copies = False


class _Buffer:
    """A buffer, looked up at each use because modules replace their buffers, and its copy."""

    def __init__(self, owner: nn.Module, key: str) -> None:
        self._owner = owner
        self._key = key
        # As it was when `is_due` was asked last.
        self._seen: Tensor | None = None
        self._version = 0
        self._changes = False
        self._copy: Tensor | None = None

    def is_due(self) -> bool:
        """Return whether to copy it now: always, but for large buffers that training never changes (a mask, a table).

        `Tensor._version` shows neither changes through `Tensor.data` nor those of BatchNorm's statistics, so large ones
        are copied in the first batch, and later if that batch has changed them, or their version has.
        """
        before, version = self._seen, self._version
        buffer: Tensor | None = getattr(self._owner, self._key, None)
        self._seen = buffer
        if buffer is None:
            return False
        self._version = 0 if buffer.is_inference() else buffer._version
        if buffer is not before:
            self._copy = None  # it may have another dtype or device
        if before is None or self._changes:
            return True
        is_same = buffer is before and version == self._version
        if buffer.nbytes > _LARGE_BYTES and is_same and (self._copy is None or torch.equal(self._copy, buffer)):
            self._copy = None
            return False
        self._changes = True
        return True

    def pair(self) -> tuple[Tensor, Tensor]:
        """Return the buffer and room for its copy."""
        buffer, copy = self._seen, self._copy
        assert buffer is not None
        if copy is None or copy.shape != buffer.shape:
            self._copy = copy = torch.empty_like(buffer)
        return buffer, copy

    def restore(self) -> None:
        seen = self._seen
        if seen is None or self._copy is None:
            return
        is_there = getattr(self._owner, self._key, None) is seen
        if is_there:
            seen.copy_(self._copy)
        else:
            setattr(self._owner, self._key, self._copy.clone())
