"""Jobs that train with a global batch size and tell which samples made each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.bindings.trainer_lightning import ScaleLearningRate
from tests.support.scripts.rank_seeds import said_about, workers_allowed
from tests.support.scripts.trainers import like_torchrun, make_trainer

WIDTH = 4


class Numbers(Dataset[Any]):
    """Samples that know their index."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.inputs[index].sin().sum(dim=0, keepdim=True), index

    def __len__(self) -> int:
        return len(self.inputs)


class Stream(IterableDataset[Any]):
    """The same, every n-th of them on each rank."""

    def __init__(self, num_samples: int) -> None:
        self._numbers = Numbers(num_samples)

    def __iter__(self) -> Iterator[Any]:
        return (self._numbers[index] for index in range(dist.get_rank(), len(self._numbers), dist.get_world_size()))


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def make_optimizer(net: nn.Module) -> Any:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def expected_weights(batches: list[list[int]], *, num_samples: int) -> list[Tensor]:
    """What one process comes to that makes a step of each of `batches`."""
    data, net = Numbers(num_samples), make_net()
    optimizer = make_optimizer(net)
    for batch in batches:
        inputs, targets, _ = zip(*(data[index] for index in batch), strict=True)
        optimizer.zero_grad()
        F.mse_loss(net(torch.stack(inputs)), torch.stack(targets)).backward()
        optimizer.step()
    return [param.detach() for param in net.parameters()]


class Module(LightningModule):
    def __init__(self, *, is_manual: bool = False, estimates: bool = False) -> None:
        super().__init__()
        self.net = make_net()
        self.automatic_optimization = not is_manual
        self.steps: dict[int, list[int]] = {}
        self.estimated: float | None = None
        self._estimates = estimates
        self.val_sizes: set[int] = set()

    def training_step(self, batch: Any) -> Tensor | None:
        inputs, targets, indices = batch
        self.steps.setdefault(self.trainer.global_step, []).extend(indices.tolist())
        loss = F.mse_loss(self.net(inputs), targets)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Any) -> None:
        self.val_sizes.add(len(batch[0]))

    def configure_optimizers(self) -> Any:
        if self._estimates:
            self.estimated = self.trainer.estimated_stepping_batches
        return make_optimizer(self.net)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and how."""

    size: int | None = 24
    num_samples: int = 60
    batch_size: int = 4
    drop_last: bool = False
    is_in_order: bool = False
    is_stream: bool = False
    is_manual: bool = False
    estimates: bool = False
    num_workers: int = 0
    max_epochs: int = 2
    limit_train_batches: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def steps(self, *, num_epochs: int = 2) -> list[list[int]]:
        """The samples of each step in one process. Lightning shuffles training data in any case."""
        assert self.size is not None
        steps = []
        for epoch in range(num_epochs):
            shuffles = not (self.is_stream or self.is_in_order)
            order: DistributedSampler[int] = DistributedSampler(range(self.num_samples), 1, 0, shuffle=shuffles)  # type: ignore[arg-type]
            order.set_epoch(epoch)
            indices = list(order)
            steps += [indices[first : first + self.size] for first in range(0, self.num_samples, self.size)]
        return [step for step in steps if len(step) == self.size or not self.drop_last]

    def loader(self) -> DataLoader[Any]:
        data = Stream(self.num_samples) if self.is_stream else Numbers(self.num_samples)
        return DataLoader(
            data,
            batch_size=self.batch_size,
            sampler=DistributedSampler(data, shuffle=False) if self.is_in_order else None,
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            multiprocessing_context="fork" if self.num_workers else None,
        )


@dataclass(frozen=True)
class Outcome:
    """What a rank saw.

    `steps` are its samples by the number of the step.
    """

    weights: list[Tensor]
    steps: dict[int, list[int]]
    estimated: float | None
    batch_size: int
    accumulated: int
    accumulated_afterwards: int
    num_batches: float
    val_sizes: set[int]
    lines: list[str]


class _Division(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.batch_size = trainer.train_dataloader.batch_size
        self.accumulated = trainer.accumulate_grad_batches
        self.num_batches = trainer.num_training_batches


@like_torchrun()
def train(
    *,
    setting: Setting,
    save_to: Path | None = None,
    resume_from: Path | None = None,
    max_steps: int = -1,
    base_batch_size: int | None = None,
) -> Outcome:
    """Train; save after each step, if that is wanted."""
    division = _Division()
    callbacks: list[Callback] = [division]
    if save_to is not None:
        callbacks.append(ModelCheckpoint(save_to, filename="{step}", save_top_k=-1, every_n_train_steps=1))
    if base_batch_size is not None:
        callbacks.append(ScaleLearningRate(base_batch_size=base_batch_size, warmup_steps=0))
    trainer = make_trainer(
        BucketDDPStrategy(global_batch_size=setting.size, **setting.options),
        max_epochs=setting.max_epochs,
        max_steps=max_steps,
        limit_train_batches=setting.limit_train_batches,
        num_sanity_val_steps=0,
        enable_checkpointing=save_to is not None,
        callbacks=callbacks,
    )
    module = Module(is_manual=setting.is_manual, estimates=setting.estimates)
    lines: list[str] = []
    with said_about("global batch", lines), workers_allowed():
        trainer.fit(module, setting.loader(), DataLoader(Numbers(8), batch_size=4), ckpt_path=resume_from)
    return Outcome(
        [param.detach() for param in module.net.parameters()],
        module.steps,
        module.estimated,
        division.batch_size,
        division.accumulated,
        trainer.accumulate_grad_batches,
        division.num_batches,
        module.val_sizes,
        lines,
    )


class OwnSampler(BatchSampler):
    pass


@like_torchrun()
def refusal(*, setting: Setting, case: str) -> str:
    """What a fit raises that cannot have a global batch size."""
    data = Numbers(setting.num_samples)
    loaders: dict[str, Any] = {
        "no_batches": lambda: DataLoader(data, batch_size=None),
        "own_sampler": lambda: DataLoader(data, batch_sampler=OwnSampler(RandomSampler(data), 4, False)),
        "no_loader": lambda: iter([]),
        "several": lambda: [setting.loader(), setting.loader()],
    }
    options_of: dict[str, dict[str, Any]] = {
        "accumulates": {"accumulate_grad_batches": 2},
        "schedules": {"callbacks": GradientAccumulationScheduler({0: 1, 4: 2})},
    }
    options = options_of.get(case, {})
    strategy = BucketDDPStrategy(global_batch_size=setting.size)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=case != "own_sampler", **options)
    try:
        trainer.fit(Module(is_manual=setting.is_manual), loaders.get(case, setting.loader)())
    except ValueError as error:
        return str(error)
    return "trained"
