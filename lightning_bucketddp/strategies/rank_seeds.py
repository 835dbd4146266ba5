"""Random numbers that differ from rank to rank, and that a checkpoint continues."""

from __future__ import annotations

import hashlib
import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_bucketddp.checkpoint.rank_state import from_plain, gather_to_rank_zero, to_plain
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.rank_zero import rank_zero_info
from lightning_bucketddp.wording import list_some

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# Where a checkpoint holds what is ours, and there what is this file's.
_OURS, _KEY = "bucketddp", "rank_seeds"


class RankSeeds:
    """Gives each rank a random stream of its own when training begins: Python's, numpy's, torch's and CUDA's.

    Weights are shared before that, and distributed samplers have a seed of their own, so both stay equal on all ranks.
    """

    def __init__(self) -> None:
        self._checkpoint: dict[str, Any] | None = None
        self._resumed_from: dict[str, Any] | None = None

    def take_from(self, checkpoint: dict[str, Any]) -> None:
        """Remember what a checkpoint says, for the training that may begin with it."""
        self._checkpoint = {"global_step": checkpoint.get("global_step", 0), **checkpoint.get(_OURS, {}).get(_KEY, {})}

    def forget_checkpoint(self) -> None:
        """Forget the checkpoint that was loaded: no training begins with it."""
        self._checkpoint = None

    def begin(self, *, step: int, collectives: Collectives, device: torch.device) -> None:
        """Start this rank's stream: where the checkpoint has left it, else a new one. All ranks must call this."""
        saved, self._checkpoint = self._checkpoint, None
        self._resumed_from = None
        states = [] if saved is None else saved.get("states", [])
        seeds = self._split(step if saved is None else saved["global_step"], collectives)
        if saved is None:
            rank_zero_info(f"bucketddp: rank_seeds: {seeds}.")
        elif len(states) == collectives.world_size:
            self._resumed_from = states[collectives.rank]
            _set_state(self._resumed_from, device)
            rank_zero_info("bucketddp: rank_seeds: every rank goes on with its random numbers from the checkpoint.")
        else:
            held = f"is from {len(states)} rank(s)" if states else "holds no random states"
            rank_zero_warn(
                f"bucketddp: rank_seeds: the checkpoint {held} and this run has {collectives.world_size}, so random"
                f" numbers do not go on where they were. New ones: {seeds}."
            )

    def continue_after_start(self, trainer: Trainer, device: torch.device) -> None:
        """Call before the first batch: undo what Lightning has drawn since `begin` and an uninterrupted run had not."""
        if self._resumed_from is not None and not _has_begun_epoch(trainer.fit_loop):
            _set_state(self._resumed_from, device)
        self._resumed_from = None

    def gather(self, collectives: Collectives | None, device: torch.device) -> dict[str, Any]:
        """Return what goes into the checkpoint, on rank zero. All ranks must call this; None: there are no others."""
        return {"states": gather_to_rank_zero(_get_state(device), collectives)}

    def _split(self, step: int, collectives: Collectives) -> str:
        """Seed this rank by its number; what all ranks get, in words."""
        # `seed_everything` sets the variable in every process; without it each process has a seed from the system.
        base = collectives.broadcast_json(int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())))
        seeds = [_seed_of(rank, base=base, step=step) for rank in range(collectives.world_size)]
        seed = seeds[collectives.rank]
        torch.manual_seed(seed)  # CUDA too
        # Neither from the bare number: both would turn it into the same state.
        random.seed(f"python {seed}")
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        shown = list_some([f"{seed} on rank {rank}" for rank, seed in enumerate(seeds)])
        return f"from seed {base} and step {step}: {shown}"


def _seed_of(rank: int, *, base: int, step: int) -> int:
    digest = hashlib.blake2b(f"{base}/{rank}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


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


def _get_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this process's generators as plain data, which any checkpoint may hold."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    plain: dict[str, Any] = to_plain(state)
    return plain


def _set_state(plain: dict[str, Any], device: torch.device) -> None:
    state = from_plain(plain, torch.device("cpu"))
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
