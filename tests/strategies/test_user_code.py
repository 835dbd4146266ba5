"""Backwards and hooks of which the strategy is not told: refused or warned of, or heeded as torch DDP does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy as FabricBucketDDPStrategy
from lightning_bucketddp.config import ReplicaChecks
from tests.strategies.test_equals_ddp import Manual, mask
from tests.support.ranks import RankFailed, on_ranks, run_on_ranks
from tests.support.scripts.models import WIDTH, loader
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer, ours_and_ddp


def own_backward(module: Any, batch: list[Tensor]) -> None:
    module.loss(batch).backward()


@on_ranks()
@like_torchrun()
def test_a_step_with_gradients_that_nobody_averaged_is_told_once() -> None:
    strategy = BucketDDPStrategy(replica_checks=ReplicaChecks(on_divergence="log"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(strategy, max_epochs=1).fit(Manual(own_backward), loader())
    told = [text for warning in caught if "not averaged" in (text := " ".join(str(warning.message).split()))]
    assert len(told) == (dist.get_rank() == 0)
    assert all("of `layers.0.weight`, `layers.0.bias`" in text for text in told)
    assert all("Call `self.manual_backward(loss)`" in text for text in told)


@on_ranks()
@like_torchrun()
def test_a_divided_optimizer_refuses_gradients_that_nobody_averaged() -> None:
    with pytest.raises(RuntimeError, match="were not averaged over the ranks"):
        make_trainer(BucketDDPStrategy(shard_optimizer=True), max_epochs=1).fit(Manual(own_backward), loader())


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
