"""`ScalingMonitor`: what it measures, what it leaves out, and what it does not pretend to know."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_bucketddp.bindings.trainer_lightning import ScalingMonitor
from lightning_bucketddp.callbacks import scaling
from tests.support.ranks import run_on_ranks
from tests.support.scripts import models
from tests.support.scripts.monitored import logged_in_csv
from tests.support.scripts.trainers import like_torchrun, make_trainer, said_about


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
    with patch.object(scaling, "_now", clock.read), said_about("ScalingMonitor", lines):
        trainer.fit(Timed(clock), train_data, models.loader())
    logged = logged_in_csv(directory, "global_batch_size") if trainer.is_global_zero else {}
    return Measured(logged, lines, clock.num_readings)


@pytest.mark.parametrize(("strategy", "limit_val_batches"), [("bucketddp", 0), ("ddp", 1)])
def test_throughput_is_of_all_ranks_and_of_training_alone_and_the_device_is_rarely_waited_for(
    strategy: str, limit_val_batches: int, tmp_path: Path
) -> None:
    # Twice four samples in each second of training; validation and the start of an epoch take a hundred.
    options: dict[str, Any] = {"strategy": strategy, "log_every_n_steps": 5, "limit_val_batches": limit_val_batches}
    ranks = run_on_ranks(measure, directory=tmp_path, **options)
    assert ranks[0].logged == {step: {"global_batch_size": 8, "samples_per_second": 8} for step in (4, 9, 14, 19)}
    assert [rank.num_readings for rank in ranks] == [4 + 2] * 2


SHORT = (6 * 6 + 2) / 7


@pytest.mark.parametrize(
    ("options", "batch", "rates"),
    [
        # Accumulated batches are one. Five steps in an epoch; the sixth, which begins the second, is not measured.
        ({"log_every_n_steps": 2, "accumulate_grad_batches": 2}, 16, {1: 8, 3: 8, 7: 8, 9: 8}),
        # The checkpoint after step 9 ends a measurement; step 10 begins anew, and the value of step 5 is not repeated.
        ({"log_every_n_steps": 5, "save_every": 9}, 8, {4: 8, 14: 8, 19: 8}),
        # 40 samples per rank in batches of 3: 13, and a short last batch of 1.
        ({"log_every_n_steps": 7, "batch_size": 3}, 6, {6: 6, 13: SHORT, 20: 6, 27: SHORT}),
        # The size of the last batch is not known: the first of three batches in an epoch begins, one is measured.
        ({"log_every_n_steps": 1, "batch_size": 2, "streams": True}, 4, {1: 4, 4: 4}),
    ],
)
def test_samples_are_counted(options: dict[str, Any], batch: int, rates: dict[int, float], tmp_path: Path) -> None:
    rank_zero, _ = run_on_ranks(measure, directory=tmp_path, **options)
    assert {step: values.pop("samples_per_second") for step, values in rank_zero.logged.items()} == pytest.approx(rates)
    assert list(rank_zero.logged.values()) == [{"global_batch_size": batch}] * len(rates)


def test_checkpoints_and_validation_within_an_epoch_are_left_out(tmp_path: Path) -> None:
    rank_zero, _ = run_on_ranks(
        measure, directory=tmp_path, log_every_n_steps=2, save_every=5, val_check_interval=3, limit_val_batches=1
    )
    assert {values["samples_per_second"] for values in rank_zero.logged.values()} == {8}


def test_efficiency_is_throughput_by_that_of_single_ranks_and_a_given_batch_size_counts(tmp_path: Path) -> None:
    monitor = {"single_rank_samples_per_second": 25, "batch_size_per_rank": 10}
    rank_zero, _ = run_on_ranks(measure, directory=tmp_path, monitor=monitor, batch_size=3, log_every_n_steps=7)
    logged = rank_zero.logged.values()
    assert {(values["samples_per_second"], values["scaling_efficiency"]) for values in logged} == {(20, 0.4)}
    assert rank_zero.lines == ["ScalingMonitor: 2 rank(s): 20 samples per second. Scaling efficiency 0.400."]


def test_a_single_rank_says_what_to_pass_to_more(tmp_path: Path) -> None:
    [alone] = run_on_ranks(measure, world_size=1, directory=tmp_path, strategy="auto", log_every_n_steps=5)
    assert alone.lines == [
        "ScalingMonitor: 1 rank(s): 4 samples per second. Pass `single_rank_samples_per_second=4` when you train on"
        " more ranks."
    ]
    assert alone.logged[4] == {"global_batch_size": 4, "samples_per_second": 4}


def test_a_throughput_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`single_rank_samples_per_second` is 0; it must be more than 0\."):
        ScalingMonitor(single_rank_samples_per_second=0)
