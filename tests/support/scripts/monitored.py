"""Jobs that train with a `BucketDDPMonitor`."""

from __future__ import annotations

import csv
import io
import time
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPMonitor
from lightning_bucketddp.callbacks import monitor as monitor_module
from lightning_bucketddp.reducer.observer import Clock
from tests.support.scripts import models
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer, said_about


class Accident(RuntimeError):
    pass


class Busy(Callback):
    """Takes time between steps, in every hook for that, and records when."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        start = time.perf_counter()
        time.sleep(0.002)
        self.times.append((start, time.perf_counter()))

    on_train_batch_end = on_validation_batch_end = on_train_batch_start
    on_save_checkpoint = on_train_epoch_end = on_train_batch_start


class SlowRank(models.Regression):
    def training_step(self, batch: list[Tensor]) -> Tensor:
        time.sleep(0.1 * self.global_rank)
        return super().training_step(batch)


class Skipping(models.Regression):
    """Rank 1 has nothing to contribute to every second step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return None if self.global_rank == 1 and batch_idx % 2 else super().training_step(batch)


class Failing(models.Regression):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        if batch_idx == 5:
            raise Accident
        return super().training_step(batch)


class Wide(models.Regression):
    """Has 1.5 MiB of weights, and AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(self.layers[0].in_features, 2**16), nn.ReLU(), nn.Linear(2**16, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


MODELS: dict[str, Any] = {
    "wide": Wide,
    "regression": models.Regression,
    "two_players": models.TwoPlayers,
    "lbfgs": models.LBFGSRegression,
    "unused": lambda: models.SpareLayer(used_on=()),
    "slow_rank": SlowRank,
    "skipping": Skipping,
    "failing": Failing,
}


@dataclass(frozen=True)
class Fitted:
    """The results of some fits on one rank."""

    weights: dict[str, Tensor]
    printed: str
    said: list[str]
    times_between: list[tuple[float, float]]
    num_marks: int
    in_progress_bar: float | None
    left_on_loop: bool
    state_bytes: int


@like_torchrun()
def fit(
    *,
    directory: Path,
    model: str = "regression",
    monitor: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    num_fits: int = 1,
    save_every: int | None = None,
    resume_from: Path | None = None,
    thin_after: int = 1000,
    loggers: bool = False,
    about: str = "BucketDDPMonitor",
    **trainer_options: Any,
) -> Fitted:
    """Train `model`, with a monitor that has these options; None: without one."""
    busy, marks = Busy(), [0]
    callbacks: list[Callback] = [busy]
    if monitor is not None:
        callbacks.append(BucketDDPMonitor(**monitor))
    if save_every is not None:
        callbacks.append(ModelCheckpoint(directory, "{step}", every_n_train_steps=save_every, save_top_k=-1))
    strategy = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, **(options or {}))
    if loggers:
        trainer_options["logger"] = [
            CSVLogger(directory, name="csv", version="0"),
            TensorBoardLogger(directory, name="tensorboard", version="0"),
        ]
    trainer = make_trainer(
        strategy,
        callbacks=callbacks,
        default_root_dir=directory,
        enable_checkpointing=save_every is not None,
        **{"max_epochs": 1, "num_sanity_val_steps": 0, **trainer_options},
    )
    torch.manual_seed(1)
    module: LightningModule = MODELS[model]()
    said: list[str] = []
    mark = Clock.mark

    def count(clock: Clock) -> float:
        marks[0] += 1
        return mark(clock)

    with (
        redirect_stdout(io.StringIO()) as printed,
        said_about(about, said),
        patch.object(Clock, "mark", count),
        patch.object(monitor_module, "_BATCHES_PER_PORTION", thin_after),
        suppress(Accident),
    ):
        for _ in range(num_fits):
            trainer.fit(module, models.loader(), models.loader(), ckpt_path=resume_from)
            trainer.fit_loop.max_epochs = (trainer.max_epochs or 0) + 1
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    return Fitted(
        weights={name: tensor.clone() for name, tensor in module.state_dict().items()},
        printed=printed.getvalue(),
        said=said,
        times_between=busy.times,
        num_marks=marks[0],
        in_progress_bar=trainer.progress_bar_metrics.get("overlap_pct"),
        state_bytes=sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor)),
        left_on_loop="_on_before_fetch" in vars(trainer.fit_loop.epoch_loop),
    )


def logged_in_csv(directory: Path, value: str = "step_ms") -> dict[int, dict[str, float]]:
    """What was logged, by step, of the monitor that logs this value."""
    prefix = "bucketddp/"
    logged: dict[int, dict[str, float]] = {}
    with (directory / "csv" / "0" / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            ours = {name.removeprefix(prefix): float(v) for name, v in row.items() if name.startswith(prefix) and v}
            if value in ours:
                assert int(row["step"]) not in logged
                logged[int(row["step"])] = ours
    return logged
