"""Jobs that train on data which is the same on some ranks, and tell what was said about it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.data.first_batches import FirstBatches
from tests.support.scripts.trainers import like_torchrun, make_trainer


class Numbers(IterableDataset[Tensor]):
    """Numbers from `start` on, or random ones."""

    def __init__(self, start: int | None = 0) -> None:
        self._start = start

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(40):
            yield torch.rand(3) if self._start is None else torch.full((3,), float(self._start + number))


class Batches:
    """A loader that is no `DataLoader`."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(Numbers())


class Texts(Dataset[str]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> str:
        return f"text {index}"


def rows(values: Tensor) -> Any:
    return TensorDataset(values.expand(20, 3) if values.dim() == 1 else values)


def loader_of(kind: str) -> Any:
    rank = dist.get_rank()
    different_rows = torch.arange(60.0).reshape(20, 3)
    loaders: dict[str, Any] = {
        "rows": DataLoader(rows(different_rows), batch_size=2),
        "shuffled rows": DataLoader(rows(different_rows), batch_size=2, shuffle=True),
        "stream": DataLoader(Numbers(), batch_size=2),
        "no DataLoader": Batches(),
        "random stream": DataLoader(Numbers(None), batch_size=2),
        "several loaders": {"a": DataLoader(rows(different_rows), batch_size=2), "b": DataLoader(Numbers())},
        "equal on two of three ranks": DataLoader(Numbers(100 if rank == 1 else 0), batch_size=2),
        "equal in the first step only": DataLoader(rows(torch.cat([torch.zeros(2, 3), torch.rand(18, 3) + rank])), 2),
        "another stream on each rank": DataLoader(Numbers(100 * rank), batch_size=2),
        "zeros": DataLoader(rows(torch.zeros(3)), batch_size=2),
        "one sample": DataLoader(rows(torch.tensor([1.0, 2.0, 3.0])), batch_size=2),
        "texts": DataLoader(Texts(), batch_size=2),
    }
    return loaders[kind]


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any) -> Tensor:
        return self.weight.square()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(frozen=True)
class Said:
    """What a rank has said about its data, and in how many steps it has compared it."""

    texts: list[str]
    num_steps: int


@like_torchrun()
def fit(*, kind: str, options: dict[str, Any] | None = None, **trainer_options: Any) -> Said:
    torch.manual_seed(0)
    trainer = make_trainer(
        BucketDDPStrategy(**options or {}),
        **{"max_epochs": 2, "use_distributed_sampler": False, "limit_train_batches": 8, **trainer_options},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Module(), loader_of(kind))
    strategy: Any = trainer.strategy
    compared = strategy._state.first_batches
    assert not isinstance(compared, FirstBatches) or compared._is_decided or not compared._loaders  # at no more cost
    num_steps = len(compared._steps) if isinstance(compared, FirstBatches) else 0
    return Said([str(one.message) for one in caught if "same data" in str(one.message)], num_steps)
