"""Jobs that write down every random number that training sees."""

from __future__ import annotations

import logging
import multiprocessing
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support.scripts import models
from tests.support.scripts.trainers import like_torchrun, make_trainer

NUM_SAMPLES = 24

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "after_validation": {"save_on_train_epoch_end": False},
    "end_of_epoch": {"save_on_train_epoch_end": True},
    "after_last_batch": {"every_n_train_steps": 3},
    "within_epoch": {"every_n_train_steps": 2},
}


@dataclass(frozen=True)
class Randomness:
    """What one rank has seen, step by step, and the lines about it."""

    samples: list[Any] = field(default_factory=list)
    augmentations: list[Any] = field(default_factory=list)
    dropout_masks: list[Any] = field(default_factory=list)
    initial_weights: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


class Augmented(Dataset[Any]):
    """Each sample with its index and a number of each generator that augmentations use."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        noise = [torch.rand(()).item(), float(np.random.rand()), random.random()]
        return index, torch.tensor(noise, dtype=torch.float64), torch.full((models.WIDTH,), index / NUM_SAMPLES)


class Dropped(models.Regression):
    """Writes its randomness down; validation draws random numbers too."""

    def __init__(self, seen: Randomness, *, asks_for_steps: bool, torch_seed: int | None) -> None:
        super().__init__()
        self.dropout = nn.Dropout()
        self.seen = seen
        self._asks_for_steps = asks_for_steps
        self._torch_seed = torch_seed

    def setup(self, stage: str) -> None:
        if self._torch_seed is not None:
            torch.manual_seed(self._torch_seed)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        indices, noise, inputs = batch
        mask = self.dropout(torch.ones_like(inputs))
        self.seen.samples.append(indices.tolist())
        self.seen.augmentations.append(noise.tolist())
        self.seen.dropout_masks.append(mask.tolist())
        outputs: Tensor = self.layers(inputs * mask)
        return outputs.square().mean()

    def validation_step(self, batch: list[Tensor]) -> None:
        torch.rand(1)

    def configure_optimizers(self) -> Any:
        if self._asks_for_steps:
            assert self.trainer.estimated_stepping_batches > 0  # creates the iterators of the training data
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self) -> None:
        self.seen.initial_weights.append(_weights(self))


@like_torchrun()
def train(
    *,
    strategy: str = "bucketddp",
    rank_seeds: bool | None = None,
    seed: int | None = 1,
    torch_seed: int | None = None,
    fits: int = 1,
    max_epochs: int = 2,
    num_workers: int = 0,
    asks_for_steps: bool = False,
    save: str | None = None,
    directory: Path | None = None,
    resume_from: Path | None = None,
    validate_first: Path | None = None,
    save_to: Path | None = None,
    weights_only: bool = False,
    validates: bool = True,
    num_sanity_val_steps: int = 0,
) -> Randomness:
    """Train and tell what was random."""
    seen = Randomness()
    callbacks = [ModelCheckpoint(directory, filename="{step}", save_top_k=-1, **CHECKPOINTS[save])] if save else []
    with workers_allowed(), said_about("rank_seeds", seen.lines):
        torch.manual_seed(100 + dist.get_rank())  # what processes have that nobody has seeded
        if seed is not None:
            seed_everything(seed, verbose=False)
        trainer = make_trainer(
            strategy if rank_seeds is None else BucketDDPStrategy(rank_seeds=rank_seeds),
            max_epochs=max_epochs,
            callbacks=callbacks,
            enable_checkpointing=save is not None,
            num_sanity_val_steps=num_sanity_val_steps,
            limit_val_batches=1 if validates else 0,
        )
        module = Dropped(seen, asks_for_steps=asks_for_steps, torch_seed=torch_seed)
        if validate_first is not None:
            trainer.validate(module, _loader(0), ckpt_path=validate_first, verbose=False)
        for fit in range(1, fits + 1):
            trainer.fit_loop.max_epochs = fit * max_epochs
            trainer.fit(module, _loader(num_workers), _loader(0), ckpt_path=resume_from)
        if save_to is not None:
            trainer.save_checkpoint(save_to, weights_only=weights_only)
    seen.weights.append(_weights(module))
    return seen


def _loader(num_workers: int) -> DataLoader[Any]:
    # Forked workers need not import torch.
    context = "fork" if num_workers else None
    return DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=num_workers, multiprocessing_context=context)


def _weights(module: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in module.state_dict().items()}


@contextmanager
def workers_allowed() -> Iterator[None]:
    """Let a process of the pool, which ends with the tests, start workers, which end with the training."""
    with patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        yield


@contextmanager
def said_about(subject: str, lines: list[str]) -> Iterator[None]:
    """Collect what is said about `subject`, in the log and as warnings, beside that it was set."""

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage().replace("\n ", "")  # of a line that was wrapped
            if subject in message and f"{subject}=" not in message:
                lines.append(message)

    handler = Collect()
    rank_zero.log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        rank_zero.log.removeHandler(handler)
    lines.extend(str(warning.message) for warning in caught if subject in str(warning.message))
