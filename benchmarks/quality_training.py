"""One training of a task through the Trainer, on ranks that are there already."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_bucketddp
from benchmarks.quality_formats import mean_in_format
from benchmarks.quality_tasks import TASKS, Data, Score, evaluate, schedule
from lightning_bucketddp.config import LocalSteps

pl = import_module("lightning.pytorch" if find_spec("lightning") is not None else "pytorch_lightning")

PLAIN = "fp32"
DDP = "ddp"
WIRES = (PLAIN, "bf16", "int8")
LOCAL_STEPS = (10, 30, 100)
# About how many points the curve of a training has.
NUM_POINTS = 40


def local(num_steps: int) -> str:
    """Return the name of the variant that exchanges weights after so many steps."""
    return f"local {num_steps}"


def averaged(num_steps: int) -> str:
    """Return the name of the variant that averages weights after so many steps, without an outer optimizer."""
    return f"average {num_steps}"


# By name: keywords of the strategy. Emulated ones are reduced in fp32, of values that have been rounded to a format.
VARIANTS: dict[str, dict[str, Any]] = {
    DDP: {},
    PLAIN: {},
    **{wire: {"reduce_dtype": wire} for wire in WIRES if wire != PLAIN},
    **{local(number): {"local_steps": LocalSteps(number, "rank")} for number in LOCAL_STEPS},
    # The plain mean of the weights.
    **{
        averaged(number): {"local_steps": LocalSteps(number, "rank", outer_lr=1.0, outer_momentum=0.0)}
        for number in LOCAL_STEPS
    },
    **{f"{name} emulated": {"ddp_comm_hook": mean_in_format, "ddp_comm_state": name} for name in ("int8", "fp8")},
}


@dataclass(frozen=True)
class Run:
    """A training: what it learns, and how. Equal in all but `variant` and `num_ranks`, two see the same batches."""

    task: str
    variant: str
    num_ranks: int
    seed: int
    num_steps: int


@dataclass(frozen=True)
class Trained:
    """What a rank has at the end.

    Attributes:
        curve: its training loss, each point the mean of a window of steps.
        weights: a checksum of its weights.
        seconds: what the fit took.
        score: on rank 0 alone.
        data: the digest of the data.
    """

    curve: Sequence[float]
    weights: int
    seconds: float
    score: Score | None
    data: int = 0


class Trainings:
    """Trains one run after the other."""

    def __init__(self, settings: None, device: torch.device) -> None:
        pass

    def train(self, run: Run) -> Trained:
        """Train, and evaluate rank 0's model."""
        return train(run)


def train(run: Run) -> Trained:
    """Train on this rank, and evaluate rank 0's model."""
    task, data = TASKS[run.task], TASKS[run.task].data()
    pl.seed_everything(run.seed, verbose=False)
    module = _Module(task.model(), lr=task.lr, num_steps=run.num_steps)
    strategy = pl.strategies.DDPStrategy if run.variant == DDP else lightning_bucketddp.BucketDDPStrategy
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=run.num_ranks,
        strategy=strategy(**VARIANTS[run.variant]),
        max_steps=run.num_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = _Samples(data, number=run.num_steps * task.global_batch)
    # By the Trainer's sampler, a step has the same samples on any number of ranks.
    batch_size = task.global_batch // run.num_ranks
    loader = DataLoader(samples, batch_size=batch_size, shuffle=True, collate_fn=_already_a_batch)
    began = time.perf_counter()
    trainer.fit(module, loader)
    seconds = time.perf_counter() - began
    windows = torch.stack(module.losses).split(max(1, run.num_steps // NUM_POINTS))
    curve = [round(float(losses.mean()), 4) for losses in windows]
    score = evaluate(module.model, data) if dist.get_rank() == 0 else None
    return Trained(curve, _checksum(module.model), seconds, score, data.digest)


class _Module(pl.LightningModule):  # type: ignore[name-defined,misc]
    def __init__(self, model: nn.Module, *, lr: float, num_steps: int) -> None:
        super().__init__()
        self.model = model
        self._lr = lr
        self._num_steps = num_steps
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        loss = F.cross_entropy(self.model(inputs), labels)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self._lr, weight_decay=0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, self._num_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class _Samples(Dataset[Any]):
    """All samples of a training as one epoch, because the end of an epoch is an exchange, too.

    Batches are cut out of tensors at once: one by one samples would take as long as a step.
    """

    def __init__(self, data: Data, *, number: int) -> None:
        self._data = data
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices) % len(self._data.inputs)
        return self._data.inputs[chosen], self._data.labels[chosen]


def _already_a_batch(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


def _checksum(model: nn.Module) -> int:
    """Return a sum over the bits of all weights."""
    return sum(int(param.detach().view(torch.int32).sum(dtype=torch.int64)) for param in model.parameters())
