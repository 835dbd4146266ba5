"""Jobs that evaluate, and tell which samples each rank has seen and what was logged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SubsetRandomSampler
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.strategies.exact_evaluation import gather_predictions
from tests.support.scripts.fabrics import make_fabric
from tests.support.scripts.trainers import like_torchrun, make_trainer

NUM_CLASSES = 3


class Numbered(Dataset[tuple[int, float, int]]):
    """Samples that tell their number."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        return index, float(index * index % 97), index % NUM_CLASSES

    def __len__(self) -> int:
        return self.num_samples


class Batched(Numbered):
    """Gives batches of one by itself, so that the loader makes none."""

    def __getitem__(self, index: int) -> Any:
        return [torch.tensor([value]) for value in super().__getitem__(index)]


class Stream(IterableDataset[Any]):
    def __init__(self, num_samples: int) -> None:
        self.samples = Numbered(num_samples)

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(len(self.samples)))


class ByParity(BatchSampler):
    """Batches of even numbers, and then of odd ones: as a sampler does that puts what is alike together."""

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        for parity in (0, 1):
            some = [index for index in indices if index % 2 == parity]
            yield from (some[at : at + self.batch_size] for at in range(0, len(some), self.batch_size))

    def __len__(self) -> int:
        sizes = [len([index for index in self.sampler if index % 2 == parity]) for parity in (0, 1)]
        return sum(-(-size // self.batch_size) for size in sizes)


@dataclass(frozen=True)
class Case:
    """What is evaluated: loaders of so many samples, and how."""

    num_samples: tuple[int, ...]
    batch_size: int | None = 4
    kind: str = "plain"
    drop_last: bool = False
    shuffle: bool = False
    num_workers: int = 0
    mode: Literal["min_size", "max_size_cycle", "max_size", "sequential"] = "sequential"
    exact: bool = True
    trainer: dict[str, Any] = field(default_factory=dict)

    def loaders(self) -> Any:
        loaders = [self._loader(num_samples) for num_samples in self.num_samples]
        return CombinedLoader(loaders, self.mode) if self.mode != "sequential" else loaders

    def _loader(self, num_samples: int) -> DataLoader[Any]:
        dataset: Any = Numbered(num_samples)
        options: dict[str, Any] = {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
        if self.batch_size is None:
            return DataLoader(Batched(num_samples), batch_size=None, **options)
        if self.kind == "stream":
            return DataLoader(Stream(num_samples), batch_size=self.batch_size, **options)
        if self.kind == "custom batches":
            return DataLoader(dataset, batch_sampler=ByParity(range(num_samples), self.batch_size, False), **options)
        options.update(batch_size=self.batch_size, drop_last=self.drop_last)
        if self.kind == "subset":
            return DataLoader(dataset, sampler=SubsetRandomSampler(range(0, num_samples, 2)), **options)
        if self.kind == "distributed":
            return DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False), **options)
        return DataLoader(dataset, shuffle=self.shuffle, **options)


class Counting(LightningModule):
    """Logs in every way that is synchronised, and meets the other ranks in every step."""

    def __init__(self, *, is_combined: bool = False) -> None:
        super().__init__()
        self.is_combined = is_combined
        self.layer = nn.Linear(1, 1)
        self.mean, self.accuracy, self.auroc = MeanMetric(), MulticlassAccuracy(NUM_CLASSES), BinaryAUROC()
        self.seen: list[list[int]] = []
        self.num_steps = 0

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.layer(batch[1].float()[:, None]).mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        # In a combined loader's batch, one for each loader; None: it has ended.
        for number, part in enumerate([batch] if isinstance(batch[0], Tensor) else batch):
            if part is not None:
                self._count(f"{number}", *part)
        # Hangs, or adds up steps of different numbers, if the ranks do not take the same steps.
        steps = torch.tensor([batch_idx, 1])
        dist.all_reduce(steps)
        assert steps.tolist() == [batch_idx * dist.get_world_size(), dist.get_world_size()]
        self.num_steps += 1

    test_step = validation_step

    def _count(self, name: str, indices: Tensor, values: Tensor, labels: Tensor) -> None:
        self.seen.append(indices.tolist())
        values = values.float()
        epoch: dict[str, Any] = {"on_epoch": True, "on_step": False, "sync_dist": True}
        if not self.is_combined:  # then Lightning cannot tell the size of a batch
            self.log(f"value{name}", values.mean(), **epoch)
            self.log(f"stepped{name}", values.mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.log(f"sized{name}", values.mean(), batch_size=len(values), **epoch)
        for fx in ("sum", "min", "max"):
            self.log(f"{fx}{name}", getattr(values, fx)(), reduce_fx=fx, **epoch)
        guesses = (indices * 7 // 5) % NUM_CLASSES
        self.mean(values)
        self.accuracy(guesses, labels)
        self.auroc((values / 97), (indices % 2).int())
        self.log_dict({f"mean{name}": self.mean, f"accuracy{name}": self.accuracy, f"auroc{name}": self.auroc})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Data(LightningDataModule):
    """Gives new loaders each time it is asked."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.num_asked = 0

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbered(8), batch_size=2)

    def val_dataloader(self) -> Any:
        self.num_asked += 1
        return self.case.loaders()


@like_torchrun()
def evaluate(cases: list[Case], stage: str = "validate") -> list[dict[str, Any]]:
    """What this rank has seen, batch by batch, and what it has logged, for each of `cases`."""
    return [_evaluate(case, stage) for case in cases]


def _evaluate(case: Case, stage: str) -> dict[str, Any]:
    # Unlike in `ddp`, nothing depends on ranks that draw the same random numbers.
    torch.manual_seed(dist.get_rank())
    strategy = BucketDDPStrategy(exact_evaluation=case.exact)
    trainer = make_trainer(strategy, **{"max_epochs": 1, "num_sanity_val_steps": 0, **case.trainer})
    module, data = Counting(is_combined=case.mode != "sequential"), Data(case)
    if stage == "fit":
        trainer.fit(module, data)
    else:
        getattr(trainer, stage)(module, case.loaders(), verbose=False)
    logged = {name: value.item() for name, value in trainer.callback_metrics.items() if not name.endswith("_step")}
    return {"logged": logged, "seen": module.seen, "num_steps": module.num_steps, "num_asked": data.num_asked}


@like_torchrun()
def evaluate_with_fabric(num_samples: list[int], **options: Any) -> list[list[list[int]]]:
    """The batches that this rank gets of each of several loaders."""
    torch.manual_seed(dist.get_rank())
    fabric = make_fabric("bucketddp")
    batches = []
    for case in (Case((number,), **options) for number in num_samples):
        [loader] = case.loaders()
        exact = fabric.setup_dataloaders(fabric.strategy.exact_dataloader(loader))
        batches.append([indices.tolist() for indices, *_ in exact])
    return batches


class Writer(BasePredictionWriter):
    """Notes what it would write: by sample number, what was predicted."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.by_batch: list[tuple[int, float]] = []
        self.by_epoch: list[tuple[int, float]] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *_: Any) -> None:
        self.by_batch += zip(batch_indices, prediction["value"].tolist(), strict=True)

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        by_loader = [predictions] if len(batch_indices) == 1 else predictions
        for batches, indices in zip(by_loader, batch_indices, strict=True):
            for prediction, numbers in zip(batches, indices, strict=True):
                self.by_epoch += zip(numbers, prediction["value"].tolist(), strict=True)


@dataclass
class Named:
    """An object of the user's own."""

    names: list[str]


class Predicting(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def predict_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> Any:
        indices, values, _ = batch
        # A view of much more than it is; what depends on the batch; and what is no tensor.
        rows = values.float()[:, None].expand(-1, 1000)
        return {
            "value": rows[:, 0] * 2,
            "view": rows[:, :2],
            "of_batch": (values.sum().item(), len(values)),
            "names": [f"sample {index}" for index in indices.tolist()],
            "own": Named([str(index) for index in indices.tolist()]),
        }


@like_torchrun()
def predict(cases: list[Case], **options: Any) -> list[dict[str, Any]]:
    """What `trainer.predict` returns here, and what a writer has seen, for each of `cases`."""
    return [_predict(case, options) for case in cases]


def _predict(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    writer = Writer()
    trainer = make_trainer(BucketDDPStrategy(**options), callbacks=[writer], **case.trainer)
    returned = trainer.predict(Predicting(), case.loaders())
    return {"returned": returned, "by_batch": writer.by_batch, "by_epoch": writer.by_epoch}


def memory_of_gathering(num_batches: int, num_bytes: int) -> tuple[int, int]:
    """How many bytes this process needs to gather so many predictions of each rank, and how many it receives."""
    collectives = Collectives(torch.device("cpu"))
    predictions = [torch.ones(num_bytes, dtype=torch.uint8) for _ in range(num_batches)]
    _memory("clear_refs", "5")  # begin to look for the peak anew
    before = _memory("status")
    by_loader = [predictions]
    gather_predictions(by_loader, collectives)
    return _memory("status") - before, (len(by_loader[0]) - num_batches) * num_bytes


def _memory(file: str, text: str | None = None) -> int:
    """The peak of this process's memory; or begin to look for it."""
    path = Path("/proc/self") / file
    if text is not None:
        return path.write_text(text)
    [peak] = [line for line in path.read_text().splitlines() if line.startswith("VmHWM")]
    return int(peak.split()[1]) * 1024


@like_torchrun()
def mean_of_integers() -> tuple[float, int]:
    """What `strategy.reduce` makes of 1 on the first rank and 2 on the second, and what this rank has afterwards."""
    trainer = make_trainer(BucketDDPStrategy())
    trainer.validate(Counting(), Case((4,)).loaders(), verbose=False)
    own = torch.tensor(1 + dist.get_rank())
    return trainer.strategy.reduce(own).item(), int(own)
