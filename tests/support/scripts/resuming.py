"""Trains with `auto_resume`, is interrupted, and is started again, in jobs on ranks."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.strategies.auto_resume import AutoResume
from tests.support.scripts.trainers import like_torchrun, make_trainer

NUM_EPOCHS = 2


class Interrupted(Exception):
    """Raised on all ranks, in the place of what ends a run."""


@dataclass(frozen=True)
class Setting:
    """How a run trains.

    Attributes:
        loader: which kind of training data it has.
        num_samples: of the dataset; with `loader="two"` there is another one with half of them.
        saves: every step, or only what an exception leaves.
        checkpoints: options of the `ModelCheckpoint` in the place of ours.
        scores: what it logs as `score`, by step.
        is_manual: optimizes by itself.
        trainer: further options.
        stops: a hook ends the run after the first epoch.
        plans: asks for the number of steps in `configure_optimizers`, which makes the loaders early.
    """

    loader: str = "shuffled"
    num_samples: int = 28
    accumulate: int = 1
    saves: bool = False
    checkpoints: dict[str, Any] = field(default_factory=dict)
    scores: Sequence[float] = ()
    plans: bool = False
    stops: bool = False
    is_manual: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)
    global_batch_size: int | None = None
    num_epochs: int = NUM_EPOCHS


@dataclass(frozen=True)
class Interruption:
    """Where a run is interrupted: at a batch (counted over all epochs), in a hook."""

    batch: int
    hook: str = "training_step"


@dataclass
class Outcome:
    """What a start has done on this rank.

    Attributes:
        begun_at: the step; None: it had nothing to do.
        ended_at: the step.
        seen: the samples that it has trained on, by epoch, in order; micro-batches whose gradients are lost are not.
        messages: what was logged about `auto_resume`, and warned.
        best: what the `ModelCheckpoint` knows: the scores of the best checkpoints by their names, and the best one.
    """

    begun_at: int | None = None
    ended_at: int = 0
    is_interrupted: bool = False
    resumed_from: str | None = None
    seen: dict[int, list[int]] = field(default_factory=dict)
    weights: list[Tensor] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    best: tuple[dict[str, float], str, Any] = ({}, "", None)


class Numbers(Dataset[Tensor]):
    """Sample i is the number i."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __getitem__(self, index: Any) -> Any:
        return torch.as_tensor(index)

    def __len__(self) -> int:
        return self._size


class Pairs(BatchSampler):
    """A batch sampler of a user's, which Lightning makes again for each rank."""


class Seeing(LightningModule):
    """Writes down the samples that optimizer steps were made of."""

    def __init__(self, setting: Setting, interruption: Interruption | None, width: int = 2, note: str = "") -> None:
        super().__init__()
        self.save_hyperparameters("note")
        self.layer = nn.Linear(1, width)
        self.automatic_optimization = not setting.is_manual
        self.setting, self.interruption = setting, interruption
        self.outcome = Outcome()
        self._pending: list[int] = []

    def on_fit_start(self) -> None:
        self.outcome.resumed_from = Path(self.trainer.ckpt_path).name if self.trainer.ckpt_path else None

    def on_train_start(self) -> None:
        self.outcome.begun_at = self.trainer.global_step

    def _interrupt(self, hook: str) -> None:
        at = self.interruption
        if at is not None and at.hook == hook and self.trainer.fit_loop.total_batch_idx == at.batch:
            raise Interrupted

    def training_step(self, batch: Any) -> Tensor:
        self._interrupt("training_step")
        batches = [one for one in batch if one is not None] if isinstance(batch, list) else [batch]
        self._pending += [1000 * number + int(index) for number, one in enumerate(batches) for index in one.view(-1)]
        numbers = torch.cat([one.view(-1) for one in batches]).float()
        if self.setting.scores:
            self.log("score", self.setting.scores[self.global_step])
        loss: Tensor = self.layer(numbers.view(-1, 1) / 100).square().mean()
        if self.setting.is_manual:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self._complete_step()
        return loss

    def validation_step(self, batch: Any) -> None:
        self.layer(batch.view(-1, 1).float())

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self._complete_step()

    def _complete_step(self) -> None:
        self.outcome.seen.setdefault(self.current_epoch, []).extend(self._pending)
        self._pending = []
        self._interrupt("optimizer_step")

    def on_train_batch_end(self, *args: Any) -> None:
        self._interrupt("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = self.setting.stops

    def configure_optimizers(self) -> Any:
        if self.setting.plans:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.Adam(self.parameters(), lr=0.1)


def make_loader(setting: Setting) -> Any:
    data = Numbers(setting.num_samples)
    if setting.loader == "workers":
        return DataLoader(data, batch_size=2, shuffle=True, num_workers=1)
    if setting.loader == "single":
        return DataLoader(data, batch_size=None, shuffle=True)
    if setting.loader == "batch sampler":
        return DataLoader(data, batch_sampler=Pairs(RandomSampler(data), batch_size=2, drop_last=False))
    if setting.loader == "two":
        return [
            DataLoader(data, batch_size=2, shuffle=True),
            DataLoader(Numbers(setting.num_samples // 2), batch_size=2, shuffle=True),
        ]
    if setting.loader == "two, no cycle":
        longer, shorter = make_loader(Setting("two", setting.num_samples))
        return CombinedLoader([longer, shorter], "max_size")
    return DataLoader(data, batch_size=2, shuffle=setting.loader != "in order")


@contextmanager
def listening(messages: list[str]) -> Iterator[None]:
    """Add what is logged, and warned, to `messages`."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "`auto_resume`" in record.getMessage() or "resumable" in record.getMessage():
                messages.append(record.getMessage())

    listener = Listener()
    loggers = [rank_zero.log, logging.getLogger("py.warnings")]
    levels = [logger.level for logger in loggers]
    logging.captureWarnings(True)
    for logger in loggers:
        logger.addHandler(listener)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(listener)
            logger.setLevel(level)


@like_torchrun()
def run_program(
    *fits: Interruption | None,
    directory: Path,
    setting: Setting,
    ckpt_path: str | None = None,
    is_new_process: bool = True,
    **of_run: Any,
) -> list[Outcome]:
    """Run a program that fits once or several times, until it is interrupted; the outcome of each fit.

    Args:
        fits: where each of them is interrupted.
        is_new_process: has not fitted before, as far as it knows.
        of_run: what is given to the module, but for `filename`, which is for its checkpoints.
    """
    if is_new_process:
        AutoResume.num_fits_ended.clear()
    outcomes = []
    for interruption in fits:
        module = fit(interruption, directory=directory, setting=setting, ckpt_path=ckpt_path, **of_run)
        outcomes.append(module.outcome)
        module.outcome.weights = [param.detach().clone() for param in module.parameters()]
        if module.outcome.is_interrupted:
            break
    return outcomes


def fit(
    interruption: Interruption | None,
    *,
    directory: Path,
    setting: Setting,
    ckpt_path: str | None,
    filename: str = "{step}",
    **of_module: Any,
) -> Seeing:
    seed_everything(7)
    has_logger = setting.loader == "logger"
    saving: list[Callback] = [] if has_logger else [OnExceptionCheckpoint(directory / "checkpoints", "exception")]
    options = {"every_n_train_steps": 1, "save_top_k": -1, "save_last": True, **setting.checkpoints}
    saves = ModelCheckpoint(None if has_logger else directory / "checkpoints", filename, **options)
    if setting.saves:
        saving.append(saves)
    trainer = make_trainer(
        BucketDDPStrategy(auto_resume=True, rank_seeds=True, global_batch_size=setting.global_batch_size),
        max_epochs=setting.num_epochs if "max_steps" not in setting.trainer else None,
        default_root_dir=directory,
        enable_checkpointing=True,
        callbacks=saving,
        logger=[CSVLogger(directory, "logs"), TensorBoardLogger(directory, "board")] if has_logger else False,
        log_every_n_steps=1,
        accumulate_grad_batches=setting.accumulate,
        use_distributed_sampler=setting.loader != "own sampler",
        **setting.trainer,
    )
    module = Seeing(setting, interruption, **of_module)
    # The ranks of the tests are daemons, which may have no children.
    may_have_children = patch.dict(multiprocessing.current_process()._config, daemon=False)  # type: ignore[attr-defined]
    with listening(module.outcome.messages), may_have_children:
        try:
            validation = DataLoader(Numbers(4)) if "val_check_interval" in setting.trainer else None
            trainer.fit(module, make_loader(setting), validation, ckpt_path=ckpt_path)
        except Interrupted:
            module.outcome.is_interrupted = True
    module.outcome.ended_at = trainer.global_step
    scores = {Path(path).name: float(score) for path, score in saves.best_k_models.items()}
    module.outcome.best = scores, Path(saves.best_model_path).name, saves.best_model_score
    return module


def start(interruption: Interruption | None = None, **options: Any) -> Outcome:
    """Run a program that fits once."""
    [outcome] = run_program(interruption, **options)
    return outcome


def interrupt_and_resume(
    *, directory: Path, setting: Setting, interruptions: list[Interruption]
) -> tuple[Outcome, list[Outcome]]:
    """Train without an interruption, and with these; what each start has done."""
    undisturbed = start(directory=directory / "undisturbed", setting=setting)
    starts = [
        start(interruption, directory=directory / "disturbed", setting=setting)
        for interruption in [*interruptions, None]
    ]
    return undisturbed, starts
