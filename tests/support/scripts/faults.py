"""Training that goes wrong, as told: which rank, where, and how."""

from __future__ import annotations

import inspect
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.local_steps.islands import OuterStep
from tests.support.scripts.trainers import make_trainer

NUM_BATCHES = 400
LINGERING_S = 6
# From one SIGINT to the next.
GAP_S = {"Ctrl-C, passed on by the parent": 0.1, "Ctrl-C twice": 1.2}


@dataclass(frozen=True)
class Fault:
    """What happens, on which rank (None: on all), in which function, at which batch."""

    what: str
    where: str = "training_step"
    rank: int | None = 1
    batch: int = 3
    # Of the user, where one is needed.
    own_group: list[Any] = field(default_factory=list)

    def is_due(self, where: str, rank: int, batch: int) -> bool:
        return (where, batch) == (self.where, self.batch) and self.rank in (rank, None)

    def happen(self, directory: Path) -> None:
        write(directory / "fault.json", {"at": time.time(), "pid": os.getpid()})
        if self.what == "raise":
            raise ValueError("boom")
        if self.what == "exit":
            os._exit(0)
        if self.what == "raise in a library":
            _deep_in_torch(int)("boom")
        if self.what == "sleep":
            time.sleep(1000)
        if self.what == "sleep in a library":
            _deep_in_torch(time.sleep)(1000)
        if self.what == "collective":
            # That no other rank calls, in a group of its own: gloo aborts where different collectives meet.
            dist.all_reduce(torch.ones(1), group=self.own_group[0])
        if self.what == "SIGTERM and sleep":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(6)
        if self.what == "Ctrl-C, noticed late by rank 1":
            time.sleep(0.8 * _rank())
            os.kill(os.getpid(), signal.SIGINT)
        if self.what in GAP_S:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(GAP_S[self.what])
            os.kill(os.getpid(), signal.SIGINT)
        if hasattr(signal, self.what):
            os.kill(os.getpid(), getattr(signal, self.what))


class Samples(Dataset[Tensor]):
    """Numbers; one of them may be a fault."""

    def __init__(self, fault: Fault | None, directory: Path) -> None:
        self._fault = fault
        self._directory = directory

    def __len__(self) -> int:
        return 4 * NUM_BATCHES

    def __getitem__(self, index: int) -> Tensor:
        if self._fault is not None and index >= 4 * self._fault.batch:
            self._fault.happen(self._directory)
        return torch.full((4,), index / 100)


class Model(LightningModule):
    """Learns little, logs a metric that is gathered over the ranks, and fails as told."""

    def __init__(
        self, fault: Fault | None, directory: Path, *, pause_s: float, slow_from: int, pause_after_s: float
    ) -> None:
        super().__init__()
        self.layers: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.mean = torchmetrics.MeanMetric()
        self._fault = fault
        self._directory = directory
        self._pause_s = pause_s
        self._slow_from = slow_from
        self._pause_after_s = pause_after_s

    def _may_fail(self, where: str, batch: int) -> None:
        if self._fault is not None and self._fault.is_due(where, self.global_rank, batch):
            self._fault.happen(self._directory)

    def setup(self, stage: str) -> None:
        if self._fault is not None and self._fault.what == "collective":
            self._fault.own_group.append(dist.new_group())
        self._may_fail("setup", self._fault.batch if self._fault else 0)
        if self._fault is not None and self._fault.where == "outer step":
            self._fail_before(OuterStep, "_start")

    def _fail_before(self, owner: type, name: str) -> None:
        original = getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            self._may_fail("outer step", self.trainer.fit_loop.epoch_loop.batch_idx)
            return original(*args, **kwargs)

        setattr(owner, name, failing)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 0:
            write(self._directory / "training.json", {})
        self._may_fail("training_step", batch_idx)
        if batch_idx >= self._slow_from:
            time.sleep(self._pause_s)
        # Fails inside of backward, when the gradients of the layer after it have arrived.
        self.layers[1].weight.register_hook(lambda _: self._may_fail("backward", batch_idx))
        loss: Tensor = self.layers(batch).pow(2).mean()
        self.mean(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def on_after_backward(self) -> None:
        self._may_fail("on_after_backward", self.trainer.fit_loop.epoch_loop.batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self._may_fail("on_train_batch_end", batch_idx)
        write(self._directory / f"progress{self.global_rank}.json", {"step": self.trainer.global_step})
        time.sleep(self._pause_after_s)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._may_fail("on_save_checkpoint", self.trainer.fit_loop.epoch_loop.batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._may_fail("validation_step", batch_idx)
        self.log("loss", self.layers(batch).mean(), sync_dist=True)
        time.sleep(self._pause_s)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        model = self

        class Adam(torch.optim.Adam):
            elementwise = True  # for `shard_optimizer`

            def step(self, closure: Any = None) -> Any:
                output = super().step(closure)
                # The weights are new, and nobody has counted the step yet.
                model._may_fail("optimizer", model.trainer.fit_loop.epoch_loop.batch_idx)
                return output

        return Adam(self.parameters(), lr=0.01)


class Witness(Callback):
    """Writes down what each rank sees of the end, and waits for the others as a careless callback would."""

    def __init__(self, directory: Path, *, lingers_on: int | None) -> None:
        self._directory = directory
        self._lingers_on = lingers_on

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.global_rank == self._lingers_on:
            time.sleep(LINGERING_S)
        trainer.strategy.barrier("careless")
        seen = {
            "at": time.time(),
            "type": type(exception).__name__,
            "message": str(exception),
            "stack": getattr(exception, "stack", ""),
            "step": trainer.global_step,
            "weights": [p.flatten().tolist() for p in pl_module.parameters()],
            "moments": [s["exp_avg"].flatten().tolist() for s in trainer.optimizers[0].state.values()],
            "has_group": dist.is_initialized(),
            "is_global_zero": trainer.is_global_zero,
        }
        write(self._directory / f"seen{trainer.global_rank}.json", seen)


def fit(
    *,
    directory: Path,
    fault: Fault | None = None,
    pause_s: float = 0.0,
    slow_from: int = 0,
    pause_after_s: float = 0.0,
    save_every: int = 10**6,
    lingers_on: int | None = None,
    timeout_s: float = 1800,
    num_workers: int = 0,
    ignores_sigint: bool = False,
    val_check_interval: int | None = None,
    num_batches: int | None = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> None:
    """Train until something goes wrong."""
    if ignores_sigint:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    strategy = BucketDDPStrategy(timeout=timedelta(seconds=timeout_s), bucket_cap_mb=1e-4, **options)
    can_save_on_exception = "save_on_exception" in inspect.signature(ModelCheckpoint).parameters  # Lightning 2.6
    on_exception: dict[str, Any] = {"save_on_exception": True} if can_save_on_exception else {}
    saving = ModelCheckpoint(directory / "saved", every_n_train_steps=save_every, **on_exception)
    num_devices = int(os.environ.get("LOCAL_WORLD_SIZE", 2))
    trainer = make_trainer(
        strategy,
        devices=num_devices,
        num_nodes=int(os.environ.get("WORLD_SIZE", num_devices)) // num_devices,
        max_epochs=1,
        limit_train_batches=num_batches,
        val_check_interval=val_check_interval,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        # The first removes its file when a run has ended well.
        callbacks=[
            OnExceptionCheckpoint(directory / "on_exception"),
            saving,
            Witness(directory, lingers_on=lingers_on),
        ],
    )
    of_worker = fault if fault is not None and fault.where == "data worker" and _rank() == fault.rank else None
    # Not as this process was made: a server for its workers would have to import everything again.
    context = "fork" if num_workers else None
    loader = DataLoader(
        Samples(of_worker, directory), batch_size=2, num_workers=num_workers, multiprocessing_context=context
    )
    validation = DataLoader(Samples(None, directory), batch_size=2) if val_check_interval else None
    model = Model(fault, directory, pause_s=pause_s, slow_from=slow_from, pause_after_s=pause_after_s)
    trainer.fit(model, loader, validation, ckpt_path=ckpt_path)
    write(directory / f"finished{trainer.global_rank}.json", {"step": trainer.global_step})


def write(path: Path, content: dict[str, Any]) -> None:
    """At once, for a reader that looks while we write, and for another rank that writes the same."""
    ours = path.with_suffix(f".{os.getpid()}.tmp")
    ours.write_text(json.dumps(content))
    os.replace(ours, path)


def _deep_in_torch(function: Callable[[Any], Any]) -> nn.Module:
    """A module that calls `function` below more of torch's frames than a stack is shown with."""
    module: nn.Module = nn.Identity()
    module.forward = function
    for _ in range(5):
        module = nn.Sequential(module)
    return module


def _rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
