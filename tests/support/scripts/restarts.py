"""Trains with checkpoints and resumes from the last one, as a script does that may be ended at any time.

RESULTS=directory torchrun --nproc-per-node 2 --max-restarts 2 restarts.py '[{"rank": 1, "step": 5}]' [by-itself]

The argument says what happens to whom in which attempt: killed at the end of a step, killed while writing the
checkpoint of one, or sent the signal of SLURM in the middle of the step that follows it. With `by-itself` the strategy
finds the checkpoint, and the loader does not know where it was.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDPStrategy

NUM_EPOCHS = 3
STEPS_PER_EPOCH = 6


class ResumableLoader(DataLoader[Any]):
    """Knows how many batches it has given, as torchdata's `StatefulDataLoader` does."""

    _num_given = 0
    _num_to_skip = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._rest_of(super().__iter__())

    def _rest_of(self, batches: Iterator[Any]) -> Iterator[Any]:
        num_to_skip, self._num_to_skip = self._num_to_skip, 0
        for index, batch in enumerate(batches):
            if index >= num_to_skip:
                self._num_given = index + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"num_given": self._num_given % STEPS_PER_EPOCH}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._num_to_skip = state["num_given"]


class Noisy(LightningModule):
    """Draws random numbers in every step, has an optimizer and a scheduler with state, and validates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 1))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(self.layers(inputs + 0.1 * torch.randn_like(inputs)), targets)

    def validation_step(self, batch: list[Tensor]) -> None:
        inputs, targets = batch
        self.log("loss", F.mse_loss(self.layers(inputs), targets), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


class _KillsWhenPickled:
    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Ended(Callback):
    """Kills this process at a step of an attempt, and writes down where each attempt has begun."""

    def __init__(self, attempt: int, plan: list[dict[str, Any]]) -> None:
        self._attempt = attempt
        self._plan = plan[attempt] if attempt < len(plan) else {"rank": None, "step": None}

    def _is_due(self, trainer: Trainer) -> bool:
        return trainer.global_rank == self._plan["rank"] and trainer.global_step == self._plan["step"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        write(f"attempt{self._attempt}.rank{trainer.global_rank}", trainer.global_step)
        Path(os.environ["RESULTS"], f"{trainer.global_rank}.pid").write_text(f"{os.getpid()}\n")

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self._is_due(trainer) and "while" not in self._plan:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        if self._is_due(trainer) and self._plan.get("while") == "stepping":
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._is_due(trainer) and self._plan.get("while") == "saving":
            checkpoint["payload"] = _KillsWhenPickled()


def loader(kind: type[DataLoader[Any]], *, shuffle: bool) -> DataLoader[Any]:
    inputs = torch.linspace(-1, 1, 96).view(24, 4)
    data = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
    return kind(data, batch_size=24 // 2 // STEPS_PER_EPOCH, shuffle=shuffle)


def train(
    directory: Path, *callbacks: Callback, ckpt_path: str | None = "last", auto_resume: bool = False
) -> dict[str, Any]:
    """Train on from the last checkpoint in `directory`; the weights, the optimizer's state and the random numbers."""
    torch.set_num_threads(1)
    seed_everything(1)
    often = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=BucketDDPStrategy(rank_seeds=True, auto_resume=auto_resume),
        max_epochs=NUM_EPOCHS,
        default_root_dir=directory,
        callbacks=[*callbacks, often],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Noisy()
    training_data = loader(DataLoader if auto_resume else ResumableLoader, shuffle=True)
    trainer.fit(module, training_data, loader(DataLoader, shuffle=False), ckpt_path=ckpt_path)
    state = [module.state_dict(), trainer.optimizers[0].state_dict(), torch.get_rng_state()]
    return {"steps": trainer.global_step, "state": flattened(state)}


def flattened(value: Any) -> Any:
    """`value` as JSON, with the bytes of each tensor."""
    if isinstance(value, Tensor):
        return value.numpy().tobytes().hex()
    if isinstance(value, dict):
        return {str(key): flattened(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [flattened(item) for item in value]
    return value


def write(name: str, result: Any) -> None:
    Path(os.environ["RESULTS"], f"{name}.json").write_text(json.dumps(result))


def main() -> None:
    of_slurm = "SLURM_JOB_ID" in os.environ
    attempt = int(os.environ["SLURM_RESTART_COUNT" if of_slurm else "TORCHELASTIC_RESTART_COUNT"])
    rank = os.environ["SLURM_PROCID" if of_slurm else "RANK"]
    if attempt > 0 and rank == "0":
        time.sleep(2)  # until the others have looked for it, and may have found what an earlier attempt has left
    auto_resume = "by-itself" in sys.argv
    # In a job that SLURM has started again Lightning finds the checkpoint by itself.
    result = train(
        Path(os.environ["RESULTS"], "checkpoints"),
        Ended(attempt, json.loads(sys.argv[1])),
        ckpt_path=None if of_slurm or auto_resume else "last",
        auto_resume=auto_resume,
    )
    write(f"end.rank{rank}", result)


if __name__ == "__main__":
    main()
