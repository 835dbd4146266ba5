"""Jobs that look for a batch size, with memory that is used up on one rank only."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, callbacks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, TensorDataset

import lightning_bucketddp
from lightning_bucketddp.reducer.observer import ReducerStats
from tests.support.ranks import raised_by
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer

WIDTH = 4
SAMPLES_PER_RANK = 128


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A rank runs out of memory when its batch is larger than `largest`.

    Attributes:
        rank: which one does.
        where: in what.
        step: of a trial; the first backward launches nothing before it ends, later ones do.
        error: what is raised.
    """

    rank: int = 1
    largest: int = 24
    where: str = "forward"
    step: int = 0
    error: type[Exception] = torch.OutOfMemoryError

    def use(self, where: str, batch: Tensor, module: LightningModule) -> None:
        is_used_up = len(batch) > self.largest and module.global_rank == self.rank
        if is_used_up and where == self.where and module.global_step == self.step:
            raise self.error("CUDA out of memory. Not really.")


class Hungry(LightningModule):
    """Talks to the other ranks in forward and after it."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
        self.batch_size = 2
        self.sizes: list[int] = []
        self.trained_in_mode: set[bool] = set()
        self._memory = memory

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self._batch = batch[0]
        self._see(batch[0])
        self.trained_in_mode.add(self.net.training)
        self._memory.use("forward", batch[0], self)
        hidden = self.net[:3](batch[0])
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._memory.use("backward", batch[0], self))
        outputs = self.net[3:](hidden)
        everywhere: Any = self.all_gather(outputs.detach())
        self.log("mean", everywhere.mean(), sync_dist=True)
        return outputs.square().mean()

    def on_before_backward(self, loss: Tensor) -> None:
        self._memory.use("before_backward", self._batch, self)

    def reduce(self, _state: object, bucket: Any) -> Any:
        """Reduce as a communication hook does, but for a bucket in the middle."""
        if bucket.index() == 1:
            self._memory.use("bucket", self._batch, self)
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]

    def validation_step(self, batch: list[Tensor]) -> None:
        if self.trainer.state.fn != "fit":
            self._see(batch[0])
        self._memory.use("validation", batch[0], self)
        self.log("loss", self.net(batch[0]).mean(), sync_dist=True)

    def test_step(self, batch: list[Tensor]) -> None:
        self.validation_step(batch)

    def _see(self, batch: Tensor) -> None:
        if self.sizes[-1:] != [len(batch)]:
            self.sizes.append(len(batch))

    def train_dataloader(self) -> Any:
        inputs = torch.randn(SAMPLES_PER_RANK * self.trainer.world_size, WIDTH, generator=torch.Generator())
        return DataLoader(TensorDataset(inputs), batch_size=self.batch_size)

    val_dataloader = test_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class Found:
    size: int | None
    sizes: list[int]
    weights: list[Any]
    num_steps: int
    num_backwards: int
    trained_in_mode: set[bool]
    files: list[str]


def look(
    *,
    directory: Path,
    memory: Memory = Memory(),  # noqa: B008
    is_ours: bool = True,
    by: str = "callback",
    method: str = "fit",
    mode: str = "power",
    fixed: int | None = None,
    options: dict[str, Any] | None = None,
    **trainer_options: Any,
) -> Found:
    """Look for a batch size, by our classes or by Lightning's, then do with it what it was looked for.

    With a `fixed` one nothing is looked for.
    """
    module = Hungry(memory)
    package: Any = lightning_bucketddp if is_ours else callbacks
    finder = package.BatchSizeFinder(mode=mode) if by == "callback" and fixed is None else None
    module.batch_size = fixed or module.batch_size
    hook = module.reduce if memory.where == "bucket" else None
    strategy = lightning_bucketddp.BucketDDPStrategy(
        bucket_cap_mb=SMALL_BUCKETS_MB, ddp_comm_hook=hook, **(options or {})
    )
    trainer = make_trainer(
        strategy if is_ours else "auto",
        max_epochs=1,
        limit_val_batches=4,
        num_sanity_val_steps=0,
        default_root_dir=directory,
        callbacks=[] if finder is None else [finder],
        **trainer_options,
    )
    size = None
    if by == "tuner":
        size = lightning_bucketddp.Tuner(trainer).scale_batch_size(module, method=method, mode=mode)
    tried = list(module.sizes)
    getattr(trainer, method)(module)
    if finder is not None:
        size, tried = finder.optimal_batch_size, module.sizes
    assert type(vars(dist.ProcessGroup)["allreduce"]).__name__ == "instancemethod"  # torch's own again
    assert fixed is not None or module.batch_size == size
    return Found(
        size,
        tried,
        [value.tolist() for value in module.state_dict().values()],
        trainer.global_step,
        getattr(getattr(trainer.strategy, "reducer", None), "stats", ReducerStats()).num_backwards,
        module.trained_in_mode,
        sorted(file.name for file in directory.iterdir()),
    )


@like_torchrun()
def find(**options: Any) -> Found:
    return look(**options)


@like_torchrun()
def refusal(**options: Any) -> str:
    return raised_by(lambda: look(**options))


if __name__ == "__main__":
    # On two ranks that Lightning starts.
    results = Path(os.environ["RESULTS"])
    found = look(directory=results, mode="binsearch", devices=2)
    text = json.dumps({"size": found.size, "sizes": found.sizes})
    (results / f"found.rank{os.environ.get('LOCAL_RANK', '0')}.json").write_text(text)
