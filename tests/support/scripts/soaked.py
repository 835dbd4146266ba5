"""Trains as a user's script does, with checkpoints, and has the accident that it is told of.

python soaked.py '{"directory": "/tmp/run", "start_method": "popen", "fault": {"what": "raise", "rank": 1, "step": 7}}'

The data of a step follow from its number, so that a run that is started again can end with the same weights, wherever
it was ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_bucketddp import BucketDDPStrategy

NUM_EPOCHS = 3
STEPS_PER_EPOCH = 20
SAVE_EVERY_N_STEPS = 5
START_TIMEOUT_S = 60
# More than the disks that are to be filled can hold; others must not be filled.
FILLER_BYTES = 2**30


class Model(LightningModule):
    """Learns from numbers that its rank and the step give."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def _loss(self, number: int) -> Tensor:
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        return F.mse_loss(self.layers(inputs), inputs.sin().sum(dim=1, keepdim=True))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._loss(2 * self.trainer.global_step + self.global_rank)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self._loss(batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_train_batch_end(self, *_: Any) -> None:
        # After all callbacks, so after the checkpoint of this step.
        progress = {"pid": os.getpid(), "step": self.trainer.global_step}
        write(self.trainer.default_root_dir, f"progress{self.global_rank}", progress)


class Accident(Callback):
    """What happens on one rank, once: at the first call of a function at or after a step."""

    def __init__(self, directory: str, checkpoints: str, fault: dict[str, Any]) -> None:
        self._directory = directory
        self._checkpoints = checkpoints
        self._fault = fault

    def _may_happen(self, where: str, trainer: Trainer) -> None:
        fault = self._fault
        is_due = fault.get("where") == where and trainer.global_step >= fault["step"]
        if is_due and trainer.global_rank == fault["rank"] and not (Path(self._directory) / "fault.json").exists():
            write(self._directory, "fault", {"at": time.time()})
            getattr(self, f"_{fault['what'].replace('-', '_')}")(trainer.lightning_module)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._may_happen("training", trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._may_happen("callback", trainer)

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._may_happen("validation", trainer)

    def _raise(self, module: LightningModule) -> None:
        raise ValueError("an accident")

    def _exit(self, module: LightningModule) -> None:
        os._exit(self._fault["status"])

    def _slow(self, module: LightningModule) -> None:
        time.sleep(3)

    def _flip_weight(self, module: LightningModule) -> None:
        weight = module.layers[0].weight.data.view(torch.int32)
        weight[0, 0] ^= 1 << self._fault["bit"]

    def _full_disk(self, module: LightningModule) -> None:
        with Path(self._checkpoints, "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while filler.tell() < FILLER_BYTES:
                filler.write(bytes(4096))


class Pace(Callback):
    """So slow that something can happen meanwhile."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(self._pause_s)

    def on_validation_batch_start(self, *_: Any) -> None:
        time.sleep(self._pause_s)


def write(directory: str, name: str, content: dict[str, Any]) -> None:
    """At once, for a reader that looks while we write."""
    path = Path(directory, f"{name}.json")
    path.with_suffix(".tmp").write_text(json.dumps(content))
    os.replace(path.with_suffix(".tmp"), path)


def fingerprint(module: nn.Module) -> str:
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in module.state_dict().values())).hexdigest()


class Finish(Callback):
    """Writes down what each rank has at the end of a run that is complete."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        end = {"at": time.time(), "step": trainer.global_step, "weights": fingerprint(pl_module)}
        write(trainer.default_root_dir, f"finished{trainer.global_rank}", end)


def main(
    *,
    directory: str,
    checkpoints: str,
    start_method: str,
    strategy: str,
    timeout_s: float,
    pause_s: float,
    fault: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    options: dict[str, Any] = {"start_method": start_method, "timeout": timedelta(seconds=timeout_s)}
    if strategy == "bucketddp":
        options.update(check_replicas_every_n_steps=3, stall_warning_s=2, start_timeout_s=START_TIMEOUT_S)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy={"bucketddp": BucketDDPStrategy, "ddp": DDPStrategy}[strategy](**options),
        max_epochs=NUM_EPOCHS,
        val_check_interval=STEPS_PER_EPOCH // 2,
        default_root_dir=directory,
        callbacks=[
            Pace(pause_s),
            Accident(directory, checkpoints, fault),
            # "last" finds it by its name; it is removed when a run is complete.
            OnExceptionCheckpoint(checkpoints, filename="last-on-exception"),
            ModelCheckpoint(
                checkpoints, filename="{step}", every_n_train_steps=SAVE_EVERY_N_STEPS, save_last=True, save_top_k=1
            ),
            Finish(),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    numbers = torch.arange(2 * STEPS_PER_EPOCH)
    trainer.fit(Model(), DataLoader(numbers), DataLoader(numbers[:6]), ckpt_path="last")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
