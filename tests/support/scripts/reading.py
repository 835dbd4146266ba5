"""Jobs that resume from a checkpoint of each rank's own, as hosts do that share no disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.scripts import models
from tests.support.scripts.fabrics import make_fabric
from tests.support.scripts.trainers import like_torchrun, make_trainer


@like_torchrun()
def save(*, path: Path, max_epochs: int = 1) -> None:
    """Train and save one checkpoint."""
    trainer = make_trainer("bucketddp", max_epochs=max_epochs)
    trainer.fit(models.Regression(), models.loader())
    trainer.save_checkpoint(path)


@like_torchrun()
def resume(*, directory: Path, ckpt_path: str, function: str = "fit", **options: Any) -> tuple[str | None, int]:
    """What a Trainer raises that resumes in `directory/<rank>`, and how many steps it has done.

    Args:
        ckpt_path: `last`, or the name of a file there.
    """
    own = directory / str(dist.get_rank())
    last = ModelCheckpoint(own, save_last=True)
    trainer = make_trainer("bucketddp", max_epochs=2, enable_checkpointing=True, callbacks=last)
    path = "last" if ckpt_path == "last" else own / ckpt_path
    raised = None
    try:
        getattr(trainer, function)(models.Regression(), models.loader(), ckpt_path=path, **options)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    return raised, trainer.global_step


@like_torchrun()
def load_on_one_rank(*, path: Path) -> list[str]:
    """What a user's callback loads on rank zero alone, while training."""
    loaded: list[str] = []

    class Loads(models.Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_rank == 0 and not loaded:
                loaded.extend(self.trainer.strategy.load_checkpoint(path)["state_dict"])

    make_trainer("bucketddp", max_epochs=1).fit(Loads(), models.loader())
    return loaded


@like_torchrun()
def load_with_fabric(*, directory: Path, raw: bool = False) -> tuple[str | None, float]:
    """What Fabric raises for `directory/<rank>/model.ckpt`, and what the weight is then, which was zero before."""
    fabric = make_fabric("bucketddp")
    module = fabric.setup(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.zeros_(module.weight)
    path = directory / str(dist.get_rank()) / "model.ckpt"
    raised = None
    try:
        if not raw:
            fabric.load(path, {"module": module})
        elif dist.get_rank() == 0:
            fabric.load_raw(path, module)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    return raised, module.weight.item()
