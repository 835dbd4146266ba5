"""Jobs that measure training by a clock of their own, on which only what they say takes time."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_bucketddp.bindings.trainer_lightning import ScalingMonitor
from lightning_bucketddp.callbacks import scaling_monitor
from tests.support.scripts import models
from tests.support.scripts.rank_seeds import said_about
from tests.support.scripts.trainers import like_torchrun, make_trainer


@dataclass
class Clock:
    """A batch takes a second; validation, checkpoints and the start of an epoch take a hundred."""

    seconds: float = 0.0
    num_readings: int = 0

    def read(self, device: torch.device) -> float:
        self.num_readings += 1
        return self.seconds


class Timed(models.Regression):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def on_train_epoch_start(self) -> None:
        self._clock.seconds += 100

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self._clock.seconds += 1
        return super().training_step(batch)

    def validation_step(self, batch: list[Tensor]) -> None:
        self._clock.seconds += 100

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._clock.seconds += 100


class _Stream(IterableDataset[Any]):
    """Five samples for each rank; it does not say how many."""

    def __iter__(self) -> Any:
        yield from zip(torch.ones(5, models.WIDTH), torch.ones(5, 1), strict=True)


@dataclass(frozen=True)
class Measured:
    """What was logged by step, what was said at the end, and how often the device was waited for."""

    logged: dict[int, dict[str, float]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    num_readings: int = 0


@like_torchrun()
def measure(
    *,
    directory: Path,
    monitor: dict[str, Any] | None = None,
    batch_size: int = 4,
    streams: bool = False,
    save_every: int | None = None,
    strategy: str = "bucketddp",
    **options: Any,
) -> Measured:
    """Train for two epochs with a `ScalingMonitor`."""
    clock = Clock()
    lines: list[str] = []
    callbacks: list[Callback] = [ScalingMonitor(**(monitor or {}))]
    if save_every is not None:
        callbacks.append(ModelCheckpoint(directory / "checkpoints", every_n_train_steps=save_every))
    logger = CSVLogger(directory, name="csv", version="0")
    trainer = make_trainer(
        strategy,
        max_epochs=2,
        logger=logger,
        callbacks=callbacks,
        enable_checkpointing=save_every is not None,
        num_sanity_val_steps=0,
        **options,
    )
    train_data = DataLoader(_Stream(), batch_size=batch_size) if streams else models.loader(batch_size=batch_size)
    with patch.object(scaling_monitor, "_now", clock.read), said_about("ScalingMonitor", lines):
        trainer.fit(Timed(clock), train_data, models.loader())
    logged = _read(Path(logger.log_dir, "metrics.csv")) if trainer.is_global_zero else {}
    return Measured(logged, lines, clock.num_readings)


def _read(path: Path) -> dict[int, dict[str, float]]:
    prefix = "bucketddp/"
    logged: dict[int, dict[str, float]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            ours = {name.removeprefix(prefix): float(v) for name, v in row.items() if name.startswith(prefix) and v}
            if ours:
                assert int(row["step"]) not in logged
                logged[int(row["step"])] = ours
    return logged
