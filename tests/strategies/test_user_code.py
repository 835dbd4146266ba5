"""Whatever user code does around a step, on two processes `bucketddp` gives the weights that `ddp` gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy as FabricBucketDDPStrategy
from lightning_bucketddp.config import ReplicaChecks
from tests.support.ranks import RankFailed, on_ranks, run_on_ranks
from tests.support.scripts.models import WIDTH, loader
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer, ours_and_ddp


class Network(LightningModule):
    """Two layers with normalisation between them, and a head that only some batches use."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.norm = norm or nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)
        self.extra = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.first(inputs))

    def loss(self, batch: list[Tensor]) -> Tensor:
        hidden = self(batch[0])
        output = self.last(hidden)
        if self.uses_extra():
            output = output + self.extra(hidden)
        return F.mse_loss(output, batch[1])

    def uses_extra(self) -> bool:
        return True

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Picture(Callback):
    """Differentiates on rank 0 alone, for a picture of what the network looks at."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0:
            was_training = pl_module.norm.training
            pl_module.norm.eval()
            torch.autograd.backward(pl_module(batch[0]).square().sum())
            pl_module.norm.train(was_training)


class Adversarial(Network):
    """Looks for worse inputs, with more backwards on some ranks than on others."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        inputs = batch[0].clone().requires_grad_()
        for _ in range(1 + self.global_rank * batch_idx):
            self.loss([inputs, batch[1]]).backward()
            assert inputs.grad is not None
            inputs = (inputs + 0.1 * inputs.grad.sign()).detach().requires_grad_()
        self.zero_grad()
        return self.loss([inputs.detach(), batch[1]])


class ManualAdversarial(Adversarial):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Contrastive(Network):
    """Gathers from all ranks in the middle of the network, with gradients; only some ranks use the head behind that."""

    def uses_extra(self) -> bool:
        return (self.global_rank + self.trainer.fit_loop.batch_idx) % 2 == 0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs))
        gathered: Any = self.all_gather(hidden, sync_grads=True)
        return hidden + gathered.mean(dim=(0, 1))


class Masks(Callback):
    """Masks gradients by hooks that are registered when training has begun."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for param in pl_module.parameters():
            param.register_post_accumulate_grad_hook(mask)


def mask(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_((torch.arange(param.numel()) % 2).view_as(param))


class Renormalised(nn.BatchNorm1d):
    """Normalises by the running statistics in training, too."""

    def forward(self, inputs: Tensor) -> Tensor:
        super().forward(inputs.detach())
        assert self.running_mean is not None
        assert self.running_var is not None
        normalised = (inputs - self.running_mean.clone()) / (self.running_var.clone() + self.eps).sqrt()
        return normalised * self.weight + self.bias


class StatisticsInLoss(Network):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        assert isinstance(self.norm, nn.BatchNorm1d)
        assert self.norm.running_mean is not None
        return self.loss(batch) + (self.norm.running_mean.clone() * self.norm.bias).sum()


class FrozenLate(Network):
    """Freezes layers when their graph is there already, as networks that take turns do."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.first.requires_grad_(batch_idx % 2 == 0)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.first.requires_grad_(True)
        optimizer.step()


PROGRAMS: dict[str, tuple[Callable[[], LightningModule], Callable[[], list[Callback]], int]] = {
    "picture": (Network, lambda: [Picture()], 1),
    "picture_while_accumulating": (Network, lambda: [Picture()], 2),
    "adversarial": (Adversarial, list, 1),
    "manual_adversarial": (ManualAdversarial, list, 1),
    "contrastive": (Contrastive, list, 1),
    "masks": (Network, lambda: [Masks()], 1),
    "masks_while_accumulating": (Network, lambda: [Masks()], 2),
    "renormalised": (lambda: Network(Renormalised(8)), list, 1),
    "statistics_in_loss": (StatisticsInLoss, list, 1),
    "frozen_late": (FrozenLate, list, 1),
}


@like_torchrun()
def train(*, program: str, strategy: str) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())  # rank 0's weights are those that count
    module, callbacks, accumulate = PROGRAMS[program]
    made = module()
    ours = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB)
    used = "ddp_find_unused_parameters_true" if strategy == "ddp" else ours
    trainer = make_trainer(used, max_epochs=2, callbacks=callbacks(), accumulate_grad_batches=accumulate)
    trainer.fit(made, loader())
    return {name: value.tolist() for name, value in made.state_dict().items()}


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_training_equals_ddp(program: str) -> None:
    ours, ddp = ours_and_ddp(train, program=program)
    assert ours[0] == ddp[0]
    # torch DDP leaves the others the statistics of their last batch.
    weights = [name for name, _ in Network().named_parameters()]
    assert [ours[1][name] for name in weights] == [ddp[0][name] for name in weights]


class Own(Network):
    """Steps with gradients of a backward that the strategy is not told of."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


@on_ranks()
@like_torchrun()
def test_a_step_with_gradients_that_nobody_averaged_is_told_once() -> None:
    strategy = BucketDDPStrategy(replica_checks=ReplicaChecks(on_divergence="log"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(strategy, max_epochs=1).fit(Own(), loader())
    told = [text for warning in caught if "not averaged" in (text := " ".join(str(warning.message).split()))]
    assert len(told) == (dist.get_rank() == 0)
    assert all("of `first.weight`, `first.bias`" in text for text in told)
    assert all("Call `self.manual_backward(loss)`" in text for text in told)


@on_ranks()
@like_torchrun()
def test_a_divided_optimizer_refuses_gradients_that_nobody_averaged() -> None:
    with pytest.raises(RuntimeError, match="were not averaged over the ranks"):
        make_trainer(BucketDDPStrategy(shard_optimizer=True), max_epochs=1).fit(Own(), loader())


@like_torchrun()
def train_with_fabric(
    *, strategy: str = "bucketddp", own_backward: bool = False, masks: bool = False
) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    used = "ddp" if strategy == "ddp" else FabricBucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=used)
    fabric.launch()
    network = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.1))
    if masks:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(mask)
    data = fabric.setup_dataloaders(loader())
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward() if own_backward else fabric.backward(loss)
        optimizer.step()
    return {name: value.tolist() for name, value in network.state_dict().items()}


def test_hooks_that_are_registered_after_set_up_change_what_fabric_reduces() -> None:
    ours, ddp = ours_and_ddp(train_with_fabric, masks=True)
    assert ours == ddp


def test_fabric_refuses_a_step_with_gradients_that_nobody_averaged() -> None:
    with pytest.raises(RankFailed, match=r"were not averaged over the ranks.*Call `fabric.backward\(loss\)`"):
        run_on_ranks(train_with_fabric, own_backward=True)
