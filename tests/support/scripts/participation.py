"""Jobs in which the ranks contribute differently to a step, and one process that works out what has to come of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer

WIDTH = 3

# A batch: inputs, targets, and which of its elements count ("tokens").
Batch = tuple[Tensor, Tensor, Tensor]


def batches_of(rank: int, sizes: Sequence[int]) -> list[Batch]:
    """The batches of a rank: of these numbers of samples, half of the elements masked at random."""
    generator = torch.Generator().manual_seed(rank)
    made = []
    for size in sizes:
        inputs = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
        mask = torch.rand(size, generator=generator) < 0.5
        mask[0] = True
        made.append((inputs, inputs.sin().sum(dim=1), mask))
    return made


def num_tokens(batch: Batch) -> Tensor:
    return batch[2].sum()


class Net(nn.Module):
    def __init__(self, *, batchnorm: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(4) if batchnorm else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4), norm, nn.Tanh(), nn.Linear(4, 1))

    def loss(self, batch: Batch, *, of_tokens: bool = False) -> Tensor:
        inputs, targets, mask = batch
        errors = F.mse_loss(self.layers(inputs).squeeze(1), targets, reduction="none")
        return errors[mask].mean() if of_tokens else errors.mean()


def make_net(*, batchnorm: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(batchnorm=batchnorm).double()


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    # With weight decay and momentum a parameter changes even by a gradient of zero, but not without one.
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


@dataclass(frozen=True)
class Setting:
    """How the ranks differ: batch sizes by rank, (rank, batch) pairs that are skipped, what the strategy is told."""

    sizes: Sequence[Sequence[int]]
    skipped: Sequence[tuple[int, int]] = ()
    options: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    of_tokens: bool = False
    batchnorm: bool = False
    data: str = "iterable"
    manual: str | None = None
    validates: bool = True
    num_epochs: int = 2


class Module(LightningModule):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.net = make_net(batchnorm=setting.batchnorm)
        self._setting = setting
        self.automatic_optimization = setting.manual is None
        self.outputs: list[bool] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        setting = self._setting
        if setting.data == "several":
            batch, _ = batch  # type: ignore[misc]
        if setting.manual is not None:
            self._optimize(batch)
            return None
        loss = self.net.loss(batch, of_tokens=setting.of_tokens)
        # Collectives of its own, which a rank that has left the loop does not take part in.
        self.log("loss", loss, sync_dist=setting.data != "several", on_step=True, on_epoch=True, batch_size=1)
        return None if (self.global_rank, batch_idx) in setting.skipped else loss

    def _optimize(self, batch: Batch) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        # Two losses, one after the other, the second of the tokens alone.
        self.manual_backward(self.net.loss(batch))
        self.manual_backward(self.net.loss(batch, of_tokens=True))
        optimizer.step()

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.outputs.append(bool(outputs))

    def validation_step(self, batch: Batch) -> None:
        self.log("val_loss", self.net.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return make_optimizer(self)


class _Batches:
    """A list of batches; the list itself would be several loaders to Lightning."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


class _Stream(IterableDataset[Batch]):
    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def make_loader(kind: str, batches: list[Batch]) -> Any:
    loaders: dict[str, Any] = {
        "iterable": _Batches(batches),
        "generator": (batch for batch in batches),
        "stream": DataLoader(_Stream(batches), batch_size=None),
        "sized": DataLoader(batches, batch_size=None),  # type: ignore[arg-type]
        "several": [DataLoader(_Stream(batches), batch_size=None), _Batches(batches)],
    }
    return loaders[kind]


@like_torchrun()
def scale_after_skipped_steps(*, skipped: Sequence[tuple[int, int]]) -> tuple[float, list[float]]:
    """The scale of a GradScaler that doubles it at every step that is taken, and the weights at the end."""
    module = Module(Setting([[4] * 5] * 2, skipped=skipped)).float()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    batches = [(x.float(), y.float(), mask) for x, y, mask in batches_of(dist.get_rank(), [4] * 5)]
    make_trainer("bucketddp", max_epochs=1, use_distributed_sampler=False, plugins=precision).fit(
        module, _Batches(batches)
    )
    return scaler.get_scale(), [weight for p in module.parameters() for weight in p.flatten().tolist()]


@dataclass(frozen=True)
class Outcome:
    weights: list[Tensor]
    had_output: list[bool]
    num_batches: int
    num_skipped: float
    metrics: dict[str, float]
    loader_type: str


class _Metrics(Callback):
    """Keeps what was logged: the Trainer forgets it when a fit ends."""

    skipped = 0.0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.skipped = float(trainer.logged_metrics.get("bucketddp/skipped_batches_total", 0))


@like_torchrun()
def fit(*, setting: Setting) -> Outcome:
    """Train with our strategy."""
    batches = batches_of(dist.get_rank(), setting.sizes[dist.get_rank()])
    module = Module(setting)
    metrics = _Metrics()
    trainer = make_trainer(
        BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, **setting.options),
        max_epochs=setting.num_epochs,
        accumulate_grad_batches=setting.accumulate,
        use_distributed_sampler=False,
        sync_batchnorm=setting.batchnorm,
        precision="64-true",
        num_sanity_val_steps=0,
        limit_val_batches=None if setting.validates else 0,
        log_every_n_steps=1,
        callbacks=metrics,
    )
    trainer.fit(module, make_loader(setting.data, batches), _Batches(batches))
    return Outcome(
        [parameter.detach() for parameter in module.net.parameters()],
        module.outputs,
        len(module.outputs) // setting.num_epochs,
        metrics.skipped,
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        type(trainer.train_dataloader).__name__,
    )


@like_torchrun()
def loader_with_a_distributed_sampler() -> bool:
    """Whether the loader that trains is a plain one: such data is even, and is left alone."""
    data = TensorDataset(torch.randn(6, WIDTH), torch.randn(6), torch.ones(6, dtype=torch.bool))
    trainer = make_trainer("bucketddp", max_epochs=1)
    trainer.fit(Module(Setting([[]])).float(), DataLoader(data))
    return type(trainer.train_dataloader) is DataLoader


def refusal(*, setting: Setting) -> str:
    """The error that training raises on this rank."""
    try:
        fit(setting=setting)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def expected_weights(setting: Setting) -> list[Tensor]:
    """What one process comes to that sees all ranks' batches: weighted gradients over the sum of weights."""
    by_rank = [batches_of(rank, sizes) for rank, sizes in enumerate(setting.sizes)]
    net = make_net(batchnorm=setting.batchnorm)
    optimizer = make_optimizer(net)
    num_batches = max(map(len, setting.sizes))
    for _ in range(setting.num_epochs):
        for start in range(0, num_batches, setting.accumulate):
            window = range(start, min(start + setting.accumulate, num_batches))
            optimizer.zero_grad()
            _accumulate(net, setting, by_rank, window)
            optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def _accumulate(net: Net, setting: Setting, by_rank: list[list[Batch]], window: range) -> None:
    weights, losses, num_full = [], [], 0
    for index in window:
        present = [(rank, batches[index]) for rank, batches in enumerate(by_rank) if index < len(batches)]
        num_full += len(by_rank)
        if setting.batchnorm and present:
            # Normalisation over the batches of all ranks: one forward of all of them.
            together = tuple(torch.cat(parts) for parts in zip(*[batch for _, batch in present], strict=True))
            losses.append(net.loss(together))  # type: ignore[arg-type]
            weights.append(1.0)
            continue
        for rank, batch in present:
            if (rank, index) not in setting.skipped:
                losses.append(_loss(net, setting, batch))
                weights.append(_weight(setting, batch))
    if not losses:
        return
    total = torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum() / sum(weights)
    if setting.options.get("gradient_weight") is None:
        # The plain mean: Lightning divides by the size of a full window, also in the last one.
        total = total * len(window) / setting.accumulate
    total.backward()


def _loss(net: Net, setting: Setting, batch: Batch) -> Tensor:
    if setting.manual == "two_losses":
        return net.loss(batch) + net.loss(batch, of_tokens=True)
    return net.loss(batch, of_tokens=setting.of_tokens)


def _weight(setting: Setting, batch: Batch) -> float:
    weight = setting.options.get("gradient_weight")
    if weight is None:
        return 1.0
    return float(len(batch[0])) if weight == "batch_size" else float(weight(batch))
