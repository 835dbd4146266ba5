"""Jobs that train with learning rates for a larger batch and tell which one each step was made with."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from lightning_bucketddp.bindings.trainer_lightning import ScaleLearningRate
from tests.support.scripts import models
from tests.support.scripts.rank_seeds import said_about
from tests.support.scripts.schedules import SCHEDULES, Scheduled
from tests.support.scripts.trainers import like_torchrun, make_trainer


@dataclass(frozen=True)
class Rates:
    """Learning rates by step and parameter group, or by optimizer and step where there are several."""

    of_steps: list[Any] = field(default_factory=list)
    in_monitor: dict[str, Any] = field(default_factory=dict)
    at_the_end: list[Any] = field(default_factory=list)
    num_tensors: int = 0
    weights: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


@like_torchrun()
def train(
    *,
    schedule: str = "optimizer",
    scaling: dict[str, Any] | None = None,
    strategy: str = "bucketddp",
    max_epochs: int = 2,
    accumulate: int | dict[int, int] = 1,
    precision: str = "32-true",
    monitor_interval: Literal["step", "epoch"] = "step",
    directory: Path | None = None,
    save_every: int = 10,
    resume_from: Path | None = None,
    fits: int = 1,
    reload_every: int = 0,
) -> Rates:
    """Train with `ScaleLearningRate(**scaling)`, or without it."""
    used: list[Any] = []
    module = SCHEDULES[schedule](used)
    monitor = LearningRateMonitor(logging_interval=monitor_interval)
    # After the monitor: the order must not matter.
    callbacks: list[Callback] = [monitor, *([] if scaling is None else [ScaleLearningRate(**scaling)])]
    if isinstance(accumulate, dict):
        callbacks.append(GradientAccumulationScheduler(accumulate))
    if directory is not None:
        callbacks.append(ModelCheckpoint(directory, filename="{step}", save_top_k=-1, every_n_train_steps=save_every))
    options: dict[str, Any] = {} if isinstance(accumulate, dict) else {"accumulate_grad_batches": accumulate}
    trainer = make_trainer(
        strategy,
        max_epochs=max_epochs,
        logger=DummyLogger(),
        log_every_n_steps=1,
        callbacks=callbacks,
        enable_checkpointing=directory is not None,
        precision=precision,
        reload_dataloaders_every_n_epochs=reload_every,
        **options,
    )
    lines: list[str] = []
    with said_about("ScaleLearningRate", lines):
        for fit in range(1, fits + 1):
            trainer.fit_loop.max_epochs = fit * max_epochs
            data = _Growing() if reload_every else _Fixed()
            trainer.fit(module, datamodule=data, ckpt_path=resume_from if fit == 1 else None)
    optimizers: list[Any] = trainer.optimizers
    return Rates(
        of_steps=used,
        in_monitor={name: [float(rate) for rate in rates] for name, rates in monitor.lrs.items()},
        at_the_end=_rates(trainer),
        num_tensors=sum(len(optimizer.tensors) for optimizer in optimizers),
        weights={name: value.tolist() for name, value in module.state_dict().items()},
        lines=lines,
    )


class _Fixed(LightningDataModule):
    def train_dataloader(self) -> Any:
        return models.loader()


class _Growing(LightningDataModule):
    """Batches of four in the first epoch, of eight in the second."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return models.loader(batch_size=4 * (1 + self.trainer.current_epoch))


def _rates(trainer: Trainer) -> list[float]:
    return [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]


@like_torchrun()
def train_at_rate(*, rate: float, scaling: dict[str, Any] | None = None) -> dict[str, Any]:
    """The weights after training at a fixed learning rate."""
    module = Scheduled(lambda module: module.optimizer(lr=rate), [])
    callbacks = [] if scaling is None else [ScaleLearningRate(**scaling)]
    make_trainer("bucketddp", max_epochs=1, callbacks=callbacks).fit(module, models.loader())
    return {name: value.tolist() for name, value in module.state_dict().items()}


class _SaveWithinStep(Callback):
    def __init__(self, path: Path) -> None:
        self._path = path

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self._path)


class _Interruption(Exception):
    pass


class _FailWithinStep(Callback):
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step == 3:
            raise _Interruption


@like_torchrun()
def save_within_step(*, path: Path, schedule: str) -> None:
    """Save while the optimizer steps, as a signal may ask for."""
    callbacks = [ScaleLearningRate(base_batch_size=4, warmup_steps=0), _SaveWithinStep(path)]
    make_trainer("bucketddp", max_epochs=1, callbacks=callbacks).fit(SCHEDULES[schedule]([]), models.loader())


@like_torchrun()
def fail_within_step(*, schedule: str) -> dict[str, Any]:
    """What a fit leaves behind that has failed while the optimizer stepped."""
    monitor = LearningRateMonitor()
    callbacks = [monitor, ScaleLearningRate(base_batch_size=4, warmup_steps=0), _FailWithinStep()]
    trainer = make_trainer("bucketddp", max_epochs=1, callbacks=callbacks, logger=DummyLogger())
    with suppress(_Interruption):
        trainer.fit(SCHEDULES[schedule]([]), models.loader())
    hooks = [optimizer._optimizer_step_pre_hooks for optimizer in trainer.optimizers]
    return {
        "rates": _rates(trainer),
        "num_hooks": sum(len(hook) for hook in hooks),
        "monitor": sorted(name for name in vars(monitor) if name.startswith("on_")),
    }


class _Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield torch.ones(models.WIDTH), torch.ones(1)


class _ByTokens(BatchSampler):
    """A user's own, with a meaning of its own for `batch_size`."""


@like_torchrun()
def refusal(*, data: str, scaling: dict[str, Any]) -> str | None:
    """What a fit on this kind of training data raises."""
    loaders: dict[str, Any] = {
        "without_batches": lambda: DataLoader(models.loader().dataset, batch_size=None),
        "own_batch_sampler": lambda: DataLoader(
            models.loader().dataset,
            batch_sampler=_ByTokens(RandomSampler(range(models.NUM_SAMPLES)), 4, False),
        ),
        "several_loaders": lambda: [models.loader(), models.loader()],
        "endless": lambda: DataLoader(_Endless(), batch_size=4),
    }
    trainer = make_trainer("bucketddp", max_steps=2, callbacks=[ScaleLearningRate(**scaling)])
    try:
        trainer.fit(Scheduled(lambda module: module.optimizer(), []), loaders[data]())
    except ValueError as error:
        return str(error)
    return None


@like_torchrun()
def find_uneven_batch() -> list[str]:
    """What is said when rank 1 has larger batches than rank 0."""
    lines: list[str] = []
    callbacks = [ScaleLearningRate(base_batch_size=2, warmup_steps=0)]
    trainer = make_trainer("bucketddp", max_steps=2, callbacks=callbacks)
    with said_about("ScaleLearningRate", lines):
        trainer.fit(SCHEDULES["optimizer"]([]), models.loader(batch_size=4 + dist.get_rank()))
    return lines
