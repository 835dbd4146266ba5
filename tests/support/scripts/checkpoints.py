"""Jobs that train, save, fail to save, and resume."""

from __future__ import annotations

import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support.disks import not_as_root
from tests.support.scripts import models
from tests.support.scripts.hooks import HOOKS
from tests.support.scripts.trainers import like_torchrun, make_trainer


class Scheduled(models.Regression):
    """Has an optimizer and a scheduler with state."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class RecordingCheckpointIO(TorchCheckpointIO):
    """A user's own plugin."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.calls.append(f"save {Path(path).name}")
        super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.calls.append(f"load {Path(path).name}")
        return super().load_checkpoint(path, *args, **kwargs)


@like_torchrun()
def fit_and_save(*, strategy: str, max_epochs: int, save_to: Path, resume_from: Path | None = None) -> None:
    """Train until `max_epochs`, from the start or from a checkpoint, and save."""
    torch.manual_seed(dist.get_rank())
    trainer = make_trainer(strategy, max_epochs=max_epochs)
    trainer.fit(Scheduled(), models.loader(), ckpt_path=resume_from)
    trainer.save_checkpoint(save_to)


@like_torchrun()
def use_own_plugin(*, path: Path) -> list[str]:
    """What a user's own plugin is asked to do."""
    plugin = RecordingCheckpointIO()
    trainer = make_trainer("bucketddp", max_epochs=1, plugins=plugin)
    trainer.fit(Scheduled(), models.loader())
    trainer.save_checkpoint(path)
    trainer.fit(Scheduled(), models.loader(), ckpt_path=path)
    return plugin.calls


@like_torchrun()
def save_in_background(*, directory: Path, max_epochs: int, room_for_bytes: int | None = None) -> str | None:
    """Save each epoch with `AsyncCheckpointIO`; what the fit raises."""
    each_epoch = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)
    trainer = make_trainer(
        "bucketddp", max_epochs=max_epochs, plugins=AsyncCheckpointIO(), enable_checkpointing=True, callbacks=each_epoch
    )
    with full_disk(room_for_bytes):
        return raised_by(lambda: trainer.fit(Scheduled(), models.loader()))


@like_torchrun()
def save_on_full_disk(*, directory: Path, room_for_bytes: int) -> str | None:
    """Save over the checkpoint of an earlier epoch; what the fit raises."""
    each_epoch = ModelCheckpoint(directory, filename="last", enable_version_counter=False)
    trainer = make_trainer("bucketddp", max_epochs=1, enable_checkpointing=True, callbacks=each_epoch)
    trainer.fit(Scheduled(), models.loader())
    trainer.fit_loop.max_epochs = 2
    with full_disk(room_for_bytes):
        return raised_by(lambda: trainer.fit(Scheduled(), models.loader()))


class TriesToSave(Callback):
    """Saves after each epoch, with the rights of anyone if it shall, and goes on when that fails."""

    def __init__(self, path: Path, *, as_root: bool) -> None:
        self.path = path
        self.raised: list[str | None] = []
        self._rights = nullcontext if as_root else not_as_root

    def on_train_epoch_end(self, trainer: Trainer, _: Any) -> None:
        with self._rights():
            self.raised.append(raised_by(lambda: trainer.save_checkpoint(self.path)))


@like_torchrun()
def train_through_failures(*, path: Path, as_root: bool = True) -> tuple[list[str | None], dict[str, Any]]:
    """What three saves raise, and the state that training ends with all the same."""
    tries = TriesToSave(path, as_root=as_root)
    trainer = make_trainer("bucketddp", max_epochs=3, callbacks=tries)
    trainer.fit(Scheduled(), models.loader())
    state = {
        "weights": {name: value.tolist() for name, value in trainer.lightning_module.state_dict().items()},
        "optimizer": str(trainer.optimizers[0].state_dict()),
    }
    return tries.raised, state


class Saves(Callback):
    """Saves when training has failed, as `ModelCheckpoint(save_on_exception=True)` does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


class LosesTheOthers(Callback):
    def on_train_batch_start(self, _: Any, __: Any, ___: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            dist.destroy_process_group()
            raise RuntimeError("some rank has failed")


@like_torchrun()
def save_alone(*, path: Path, port: int, **options: Any) -> tuple[str | None, list[str]]:
    """Save when there is no process group any more; what the fit raises, and what is warned of."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    strategy = BucketDDPStrategy(**HOOKS["power_sgd"](), rank_seeds=True, **options)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[Saves(path), LosesTheOthers()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            raised = raised_by(lambda: trainer.fit(Scheduled(), models.loader()))
        finally:
            # For the next job.
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    return raised, [str(warning.message) for warning in caught if "bucketddp" in str(warning.message)]


@like_torchrun()
def save(*, path: Path) -> str | None:
    """What `trainer.save_checkpoint` raises after a fit."""
    trainer = make_trainer("bucketddp", max_epochs=1)
    trainer.fit(Scheduled(), models.loader())
    return raised_by(lambda: trainer.save_checkpoint(path))


@like_torchrun()
def resume(*, path: Path) -> str | None:
    """What `trainer.fit` raises for a checkpoint."""
    trainer = make_trainer("bucketddp", max_epochs=1)
    return raised_by(lambda: trainer.fit(Scheduled(), models.loader(), ckpt_path=path))


def raised_by(call: Any) -> str | None:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def full_disk(room_for_bytes: int | None) -> Iterator[None]:
    """Let no file of this process grow beyond `room_for_bytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if room_for_bytes is None else room_for_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
