"""Jobs that train on streams of numbered samples, and write down which numbers each rank has seen."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support.scripts.trainers import like_torchrun, make_trainer


class Numbers(IterableDataset[Tensor]):
    """0, 1, 2 and so on, as tensors."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(number)]) for number in range(self.num_samples))


class SizedNumbers(Numbers):
    def __len__(self) -> int:
        return self.num_samples


@dataclass(frozen=True)
class Stream:
    """What a job trains on, and how."""

    num_samples: int = 22
    is_sized: bool = False
    num_workers: int = 0
    batch_size: int = 2
    persistent: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> Stream:
        return replace(self, **changes)

    def loader(self, num_samples: int | None = None) -> DataLoader[Tensor]:
        cls = SizedNumbers if self.is_sized else Numbers
        return DataLoader(
            cls(num_samples or self.num_samples),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.persistent,
            # The start method of the processes that run jobs.
            multiprocessing_context="fork" if self.num_workers else None,
        )


class Reader(LightningModule):
    """Writes down the numbers of each batch, by stage; batches that only keep other ranks company are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: dict[str, list[list[int]]] = {"train": [], "val": [], "test": [], "predict": []}

    def training_step(self, batch: Tensor) -> Tensor:
        strategy: Any = self.trainer.strategy
        if not strategy._state.weighting.is_idle:
            self._see("train", batch)
        return self.layer(batch / 100).square().mean()

    def validation_step(self, batch: Tensor) -> None:
        self._see("val", batch)

    def test_step(self, batch: Tensor) -> None:
        self._see("test", batch)

    def predict_step(self, batch: Tensor) -> None:
        self._see("predict", batch)

    def _see(self, stage: str, batch: Tensor) -> None:
        self.seen[stage].append([int(number) for number in batch.flatten().tolist()])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _make_trainer(stream: Stream, **options: Any) -> Trainer:
    strategy = BucketDDPStrategy(**{"shard_iterable": True, **stream.options})
    return make_trainer(strategy, num_sanity_val_steps=0, **{"max_epochs": 2, **stream.trainer, **options})


@contextmanager
def _may_have_children() -> Iterator[None]:
    """Let this process start workers; one that ends with its parent may not."""
    with patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        yield


@dataclass(frozen=True)
class Seen:
    """The numbers that a rank has seen, batch by batch, and the kind of loader that gave them."""

    batches: dict[str, list[list[int]]]
    loader_type: str
    warnings: list[str]


@like_torchrun()
@_may_have_children()
def read(*, stream: Stream) -> Seen:
    """Fit with validation, test and predict."""
    module, trainer = Reader(), _make_trainer(stream)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, stream.loader(), stream.loader(7))
        loader_type = type(trainer.train_dataloader).__name__
        trainer.test(module, stream.loader(8), verbose=False)
        trainer.predict(module, stream.loader(9))
    return Seen(module.seen, loader_type, [str(one.message) for one in caught if "bucketddp" in str(one.message)])


def refusal(*, stream: Stream) -> str:
    """The error that training raises on this rank."""
    try:
        read(stream=stream)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


# How a run is interrupted: what writes the checkpoint, and what ends the run.
INTERRUPTIONS: dict[str, Any] = {
    "after a step": lambda step: ({"every_n_train_steps": step}, {"max_steps": step}),
    "after a validation": lambda step: (
        {"save_on_train_epoch_end": False},
        {"max_steps": step, "val_check_interval": step, "check_val_every_n_epoch": None},
    ),
}


@like_torchrun()
@_may_have_children()
def resume(*, stream: Stream, directory: Path, step: int, interrupted: str = "after a step") -> Any:
    """Train, once in one go and once in two; what was seen in one go, before step `step`, and after it."""
    uninterrupted = Reader()
    _make_trainer(stream).fit(uninterrupted, stream.loader())

    before = Reader()
    saves, ends = INTERRUPTIONS[interrupted](step)
    checkpoint = ModelCheckpoint(directory, save_top_k=-1, filename="{step}", **saves)
    trainer = _make_trainer(stream, enable_checkpointing=True, callbacks=checkpoint, **ends)
    validation = stream.but(is_sized=True)  # old versions of Lightning cannot resume where it has no length
    trainer.fit(before, stream.loader(), validation.loader(4))

    after = Reader()
    trainer = _make_trainer(stream)
    trainer.fit(after, stream.loader(), validation.loader(4), ckpt_path=directory / f"step={step}.ckpt")
    return uninterrupted.seen["train"], before.seen["train"], after.seen["train"]


class Failing(Reader):
    """Fails in one step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def training_step(self, batch: Tensor) -> Tensor:
        if self.global_step == self._step:
            raise ArithmeticError("failed")
        return super().training_step(batch)


@like_torchrun()
def resume_after_failure(*, directory: Path) -> Any:
    """What is seen before a step that fails, and after it."""
    stream = Stream(24, trainer={"max_epochs": 1})
    before, after = Failing(2), Reader()
    trainer = _make_trainer(stream, callbacks=OnExceptionCheckpoint(directory), enable_checkpointing=True)
    try:
        trainer.fit(before, stream.loader())
    except ArithmeticError:
        _make_trainer(stream).fit(after, stream.loader(), ckpt_path=directory / "on_exception.ckpt")
    return before.seen["train"], after.seen["train"]
