"""How many samples one optimizer step sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The batches of all ranks that one optimizer step adds up.

    Attributes:
        num_ranks: ranks that train.
        over_ranks: samples in one batch of each of them, together.
        num_micro_batches: batches that each accumulates.
    """

    num_ranks: int
    over_ranks: int
    num_micro_batches: int

    @classmethod
    def of(cls, trainer: Trainer, *, batch_size_per_rank: int | None, asked_by: str) -> GlobalBatch:
        """As the training data says, or `batch_size_per_rank`. All ranks must call this, after the data is set up."""
        on_this_rank = batch_size_per_rank or _batch_size_of(trainer.train_dataloader)
        if on_this_rank is None:
            raise ValueError(
                f"`{asked_by}` cannot tell the batch size of the training data, a"
                f" `{type(trainer.train_dataloader).__name__}`. Pass `batch_size_per_rank`, the samples in one batch of"
                " one rank."
            )
        # Summed, because all ranks must come to the same number even if their batches differ.
        summed = trainer.strategy.reduce(
            torch.tensor(on_this_rank, device=trainer.strategy.root_device), reduce_op="sum"
        )
        return cls(trainer.world_size, int(summed), trainer.accumulate_grad_batches)

    @property
    def size(self) -> int:
        return self.over_ranks * self.num_micro_batches

    def __str__(self) -> str:
        per_rank, rest = divmod(self.over_ranks, self.num_ranks)
        ranks = f"{self.over_ranks} on {self.num_ranks} ranks" if rest else f"{self.num_ranks} x {per_rank}"
        return f"global batch {ranks} x {self.num_micro_batches} = {self.size}"


def _batch_size_of(loader: Any) -> int | None:
    # Of a `DataLoader` that has made its batch sampler itself. One of the user may call anything its batch size.
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None
