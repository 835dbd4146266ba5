"""Jobs that train while their checkpoints are written."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning_utilities.core import rank_zero
from torch import Tensor, nn

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPCheckpointIO, BucketDDPStrategy
from tests.support.scripts import fabrics, models
from tests.support.scripts.checkpoints import Saves, Scheduled, full_disk, raised_by
from tests.support.scripts.trainers import like_torchrun, make_trainer

SAVED_AFTER = 2  # batches
WAIT_S = 50  # for what comes soon, or never


class HeldCheckpointIO(BucketDDPCheckpointIO):
    """Takes its time: until it is told to write, or for some seconds."""

    def __init__(self, seconds: float = WAIT_S) -> None:
        self.released = threading.Event()
        self._seconds = seconds

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.released.wait(self._seconds)
        super().save_checkpoint(*args, **kwargs)


class SavesOnce(Callback):
    """Saves in the midst of an epoch and writes down what was saved, and what else happened until when."""

    def __init__(self, path: Path, *, after: int = SAVED_AFTER) -> None:
        self.path = path
        self.after = after
        self.weights: dict[str, Any] = {}
        self.num_batches = 0
        self.num_batches_without_file = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.num_batches += 1
        if self.num_batches == self.after:
            self.weights = {name: value.tolist() for name, value in pl_module.state_dict().items()}
            trainer.save_checkpoint(self.path)
        if self.num_batches > self.after:
            self.num_batches_without_file += not self.path.exists()


class Releases(Callback):
    """Lets the storage write when training has gone on for three more batches."""

    def on_train_batch_start(self, trainer: Trainer, _: Any, __: Any, batch_idx: int) -> None:
        if batch_idx == SAVED_AFTER + 3:
            trainer.strategy.checkpoint_io.released.set()  # type: ignore[attr-defined]


class WaitsForFailure(Callback):
    """Lets rank zero train on when the write has failed, not before."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        deadline = time.monotonic() + WAIT_S
        writer = trainer.strategy._writer  # type: ignore[attr-defined]
        while writer._in_flight is not None and not writer.has_failed and time.monotonic() < deadline:
            time.sleep(0.01)


class Raises(Callback):
    def on_train_batch_start(self, _: Any, __: Any, ___: Any, batch_idx: int) -> None:
        if batch_idx == SAVED_AFTER + 1:
            raise RuntimeError("a mistake of the user's")


class FullDiskFromSecondEpoch(Callback):
    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def on_train_epoch_start(self, trainer: Trainer, _: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.strategy.wait_for_checkpoints()  # type: ignore[attr-defined]
            self._stack.enter_context(full_disk(1000))


def trainer_of(*callbacks: Callback, strategy: BucketDDPStrategy | None = None, **options: Any) -> Trainer:
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    strategy = strategy or BucketDDPStrategy(async_checkpoints=True)
    return make_trainer(strategy, callbacks=list(callbacks), enable_checkpointing=saves, **options)


@like_torchrun()
def train_while_writing(*, path: Path) -> dict[str, Any]:
    """Training gets on before anything is written."""
    saves, plugin = SavesOnce(path), HeldCheckpointIO()
    model = models.Regression()
    trainer = trainer_of(saves, Releases(), plugins=plugin, max_epochs=1)
    trainer.fit(model, models.loader())
    return {
        "saved": saves.weights,
        "final": {name: value.tolist() for name, value in model.state_dict().items()},
        "num_batches_without_file": saves.num_batches_without_file,
        "stats": trainer.strategy.checkpoint_stats,  # type: ignore[attr-defined]
    }


@like_torchrun()
def fail_while_training(*, path: Path, after: int = SAVED_AFTER, **options: Any) -> tuple[str | None, int]:
    """What the fit raises when a write fails, and how many batches it has trained by then."""
    saves = SavesOnce(path, after=after)
    strategy = BucketDDPStrategy(async_checkpoints=True, **options)
    trainer = trainer_of(saves, WaitsForFailure(), strategy=strategy, max_epochs=1)
    return raised_by(lambda: trainer.fit(models.Regression(), models.loader())), saves.num_batches


@like_torchrun()
def raise_while_writing(*, path: Path) -> tuple[str | None, bool]:
    """What the fit raises, and whether what it was writing is there at once."""
    trainer = trainer_of(SavesOnce(path), Raises(), plugins=HeldCheckpointIO(0.5), max_epochs=1)
    raised = raised_by(lambda: trainer.fit(models.Regression(), models.loader()))
    return raised, path.exists()


@like_torchrun()
def fail_to_save_on_exception(*, path: Path) -> str | None:
    """What the fit raises when the save after an exception fails."""
    trainer = trainer_of(Saves(path), Raises(), max_epochs=1)
    return raised_by(lambda: trainer.fit(models.Regression(), models.loader()))


@like_torchrun()
def fill_the_disk(*, directory: Path) -> str | None:
    """Keep one checkpoint, on a disk that has room for the first one only; what the fit raises."""
    with ExitStack() as stack:
        newest = ModelCheckpoint(directory, filename="{epoch}", save_top_k=1, enable_version_counter=False)
        trainer = trainer_of(newest, FullDiskFromSecondEpoch(stack), max_epochs=2)
        return raised_by(lambda: trainer.fit(models.Regression(), models.loader()))


@like_torchrun()
def fit_with_model_checkpoint(*, directory: Path, is_async: bool, save_last: Any = True) -> list[str]:
    """Save often: during epochs and after validations, the best two and the last; what our logger says of it."""
    best = ModelCheckpoint(directory, monitor="loss", filename="{step}-{loss:.6f}", save_top_k=2, save_last=save_last)
    during = ModelCheckpoint(directory, filename="during-{step}", every_n_train_steps=4, save_top_k=-1)
    strategy = BucketDDPStrategy(async_checkpoints=is_async)
    trainer = trainer_of(best, during, strategy=strategy, max_epochs=3, val_check_interval=5)
    with lines_logged() as lines:
        trainer.fit(Scheduled(), models.loader(), models.loader())
    return [line for line in lines if "bucketddp: " in line and "checkpoints " in line]


@contextmanager
def lines_logged() -> Iterator[list[str]]:
    """What we log inside, through our logger and through Lightning's for rank zero."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger("lightning_bucketddp"), rank_zero.log]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


@like_torchrun()
def with_plugin_that_does_the_same() -> str | None:
    trainer = trainer_of(plugins=AsyncCheckpointIO(), max_epochs=1)
    return raised_by(lambda: trainer.fit(models.Regression(), models.loader()))


class SavesAroundTraining(Callback):
    """Saves before training begins and when it has ended, and looks for the file at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.was_there: list[bool] = []

    def on_fit_start(self, trainer: Trainer, _: Any) -> None:
        self.save(trainer)

    def on_fit_end(self, trainer: Trainer, _: Any) -> None:
        self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        path = self._directory / f"{len(self.was_there)}.ckpt"
        trainer.save_checkpoint(path)
        self.was_there.append(path.exists())


@like_torchrun()
def save_around_training(*, directory: Path) -> list[bool]:
    """Whether files are there as soon as `save_checkpoint` returns: before, right after and long after training."""
    saves = SavesAroundTraining(directory)
    trainer = trainer_of(saves, plugins=HeldCheckpointIO(0.3), max_epochs=1)
    trainer.fit(models.Regression(), models.loader())
    saves.save(trainer)
    return saves.was_there


@like_torchrun()
def load_while_training(*, path: Path) -> int:
    """The step in a checkpoint that a callback saves and loads in one batch."""
    loaded = []

    class Loads(Callback):
        def on_train_batch_end(self, trainer: Trainer, _: Any, __: Any, ___: Any, batch_idx: int) -> None:
            if batch_idx == SAVED_AFTER - 1:
                loaded.append(trainer.strategy.load_checkpoint(path)["global_step"])

    trainer = trainer_of(SavesOnce(path), Loads(), plugins=HeldCheckpointIO(0.3), max_epochs=1)
    trainer.fit(models.Regression(), models.loader())
    [step] = loaded
    return int(step)


# --- Fabric


@like_torchrun()
def save_with_fabric(*, path: Path, root: str) -> dict[str, Any]:
    """Save, change the weights while nothing is written yet, and load what was saved."""
    fabric = fabrics.make_fabric(fabrics.strategy_of(root, async_checkpoints=True), root=root)
    module = fabric.setup_module(nn.Linear(2, 2))
    saved = module.weight.tolist()
    fabric.save(path, {"module": module})
    _zero(module.weight)
    fabric.load(path, {"module": module})
    return {"saved": saved, "loaded": module.weight.tolist(), "stats": fabric.strategy.checkpoint_stats}


def _zero(weight: Tensor) -> None:
    weight.detach().zero_()


@like_torchrun()
def fail_with_fabric(*, path: Path, ends: bool) -> str | None:
    """What the next save raises after one that fails, or the end of the program."""
    fabric = fabrics.make_fabric(fabrics.strategy_of(fabrics.ROOTS[0], async_checkpoints=True))
    fabric.save(path / "below" / "a file", {})
    fabric.barrier()
    if ends:
        return raised_by(fabric.strategy.wait_for_checkpoints)
    raised = raised_by(lambda: fabric.save(path.parent / "next.ckpt", {}))
    fabric.strategy.wait_for_checkpoints()
    assert dist.get_rank() != 0 or (path.parent / "next.ckpt").exists()
    return raised
