"""What the tests train: small modules, each with one thing that is special about it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 4
NUM_SAMPLES = 80


def loader(*, batch_size: int = 4) -> DataLoader[Any]:
    """80 samples, the same on every rank; with two ranks ten batches each."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True)), batch_size=batch_size)


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        # Subclasses have others, and look into them.
        self.layers: Any = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(self.layers(inputs), targets)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        return self.layers(batch[0])

    def configure_optimizers(self) -> Any:
        # With weight decay and momentum a parameter changes even by a gradient of zero, but not without one.
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


class ManualRegression(Regression):
    """Accumulates over two micro-batches of each batch by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        strategy: Any = self.trainer.strategy
        optimizer.zero_grad()
        micro_batches: list[Any] = list(zip(*(tensor.chunk(2) for tensor in batch), strict=True))
        for micro_batch in micro_batches:
            is_last = micro_batch is micro_batches[-1]
            with nullcontext() if is_last else strategy.block_backward_sync():
                loss = self.loss(micro_batch)
                self.manual_backward(loss)
        optimizer.step()


class TwoPlayers(Regression):
    """Two optimizers that take turns, as in a GAN; each turn uses all parameters and trains one half of them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * self.critic(self.layers(batch[0]) - batch[1]).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.layers, self.critic)]


class LBFGSRegression(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class ConvBatchNorm(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 1)
        )


class RankZeroBuffer(Regression):
    """Every rank changes its buffer in its own way, in a hook; what rank 0 made of it counts from the next step on."""

    scale: Tensor

    def __init__(self, *, changes_in: str) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self._changes_in = changes_in

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.scale.clone() * self.loss(batch)
        self._change("training_step")
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self._change("on_train_batch_end")

    def _change(self, hook: str) -> None:
        if hook == self._changes_in:
            self.scale *= 0.9 + 0.5 * self.global_rank


class LateBuffer(RankZeroBuffer):
    """Every rank changes another buffer, too, which the first step has registered."""

    late: Tensor

    def __init__(self) -> None:
        super().__init__(changes_in="training_step")
        self.register_buffer("late", None)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        late = torch.ones(1) if self.late is None else self.late
        self.late = late * (0.9 + 0.5 * self.global_rank)
        return late * super().training_step(batch)


class SpareLayer(Regression):
    """Has a layer that only some ranks use, or none."""

    def __init__(self, *, used_on: tuple[int, ...]) -> None:
        super().__init__()
        self.spare = nn.Linear(1, 1)
        self._used_on = used_on

    def training_step(self, batch: list[Tensor]) -> Tensor:
        outputs = self.layers(batch[0])
        return F.mse_loss(self.spare(outputs) if self.global_rank in self._used_on else outputs, batch[1])


class IdleRank(Regression):
    """Rank 1 has a loss without any parameter in it, or the same said in a way that torch DDP accepts."""

    def __init__(self, *, uses_parameters: bool) -> None:
        super().__init__()
        self._uses_parameters = uses_parameters

    def training_step(self, batch: list[Tensor]) -> Tensor:
        if self.global_rank != 1:
            return self.loss(batch)
        return 0 * self.loss(batch) if self._uses_parameters else torch.zeros((), requires_grad=True)
