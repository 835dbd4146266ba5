"""What is saved and what hinders it, for tests of checkpoints; and what tests say about them."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from tests.support.scripts import models

STATE = ["state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"]
ADVICE = "Check the free space, the quota and the permissions of its directory, or save to another one."


class Scheduled(models.Regression):
    """Has an optimizer and a scheduler with state."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class Saves(Callback):
    """Saves when training has failed, as `ModelCheckpoint(save_on_exception=True)` does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


@contextmanager
def full_disk(room_for_bytes: int | None) -> Iterator[None]:
    """Let no file of this process grow beyond `room_for_bytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if room_for_bytes is None else room_for_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def state_in(path: Path) -> dict[str, Any]:
    checkpoint = torch.load(path, weights_only=False)
    return {name: checkpoint[name] for name in STATE}


def assert_same_state(path: Path, expected: Path) -> None:
    torch.testing.assert_close(state_in(path), state_in(expected), rtol=0, atol=0)
