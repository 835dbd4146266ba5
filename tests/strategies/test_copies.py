"""A module that is copied, pickled or saved in the middle of training: the copy is free, and nothing is spoilt."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_bucketddp import BucketDDPStrategy
from tests.support.collectives import all_reduced
from tests.support.ranks import on_ranks
from tests.support.scripts.models import WIDTH, Regression, loader
from tests.support.scripts.trainers import like_torchrun, make_trainer

COLLECTIVES = ("broadcast", "all_gather", "barrier")

WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
}


class Wide(Regression):
    """A small layer beside a large one, with a normalisation layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 1000), nn.BatchNorm1d(1000), nn.Linear(1000, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.001)


class Copies(Callback):
    """Trains a copy for a step in some hook and spoils it; whoever shares something with it is spoilt too."""

    def __init__(self, way: str, hook: str) -> None:
        self.num_collectives = 0
        self.num_copies = 0
        self._way = WAYS[way]
        self._hook = hook
        self._batch: list[Tensor] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = batch

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._copy("on_after_backward", trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._copy("on_train_batch_end", trainer, pl_module)

    def _copy(self, hook: str, trainer: Trainer, pl_module: LightningModule) -> None:
        if hook != self._hook:
            return
        module = self._way(pl_module).eval()
        optimizer = copy.deepcopy(trainer.optimizers[0])
        gradients = self._way([param.grad for param in pl_module.parameters()])
        calls = {name: patch.object(dist, name, wraps=getattr(dist, name)) for name in COLLECTIVES}
        started = [call.start() for call in calls.values()]
        try:
            with all_reduced() as reduced:
                module.loss(self._batch).backward()
        finally:
            for call in calls.values():
                call.stop()
        self.num_collectives += len(reduced) + sum(call.call_count for call in started)
        self.num_copies += 1
        with torch.no_grad():
            for param in module.parameters():
                param.grad.fill_(1e6)
                param.fill_(1e6)
            for gradient in gradients:
                gradient.fill_(1e6)
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.fill_(1e6)
            for state in optimizer.state.values():
                state["exp_avg"].fill_(1e6)


def train(callback: Callback | None, *, sync_batchnorm: bool) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    module = Wide()
    make_trainer("bucketddp", max_epochs=1, callbacks=callback, sync_batchnorm=sync_batchnorm).fit(module, loader())
    return dict(module.state_dict())


@pytest.mark.parametrize(
    ("way", "hook", "sync_batchnorm"),
    [("deepcopy", "on_after_backward", True), ("pickle", "on_train_batch_end", False)],
)
@on_ranks()
@like_torchrun()
def test_a_copy_is_independent(way: str, hook: str, sync_batchnorm: bool) -> None:
    copies = Copies(way, hook)
    trained = train(copies, sync_batchnorm=sync_batchnorm)
    assert (copies.num_copies, copies.num_collectives) == (10, 0)
    torch.testing.assert_close(trained, train(None, sync_batchnorm=sync_batchnorm), rtol=0, atol=0)


class CopiesItsTrainer(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.num_copies = 0

    def _copy(self) -> None:
        self.num_copies += copy.deepcopy(self.trainer) is not self.trainer

    def setup(self, stage: str) -> None:
        self._copy()

    def on_validation_epoch_start(self) -> None:
        self._copy()

    def on_train_start(self) -> None:
        self._copy()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 1:
            self._copy()


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True, "async_checkpoints": True, "uneven_data": True}])
@on_ranks()
@like_torchrun()
def test_a_trainer_is_copied_in_a_fit_and_after_it_and_the_copy_trains_on(options: dict[str, Any]) -> None:
    ends = []
    for strategy in (BucketDDPStrategy(**options), "ddp"):
        torch.manual_seed(0)
        module = CopiesItsTrainer()
        trainer = make_trainer(strategy, max_epochs=1)
        trainer.fit(module, loader(), loader())
        assert module.num_copies >= 4
        again = copy.deepcopy(trainer)
        again.fit_loop.max_epochs = 2
        again.fit(module, loader(), loader())
        ends.append((dict(module.state_dict()), (trainer.global_step, again.global_step)))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


class Sizes(Callback):
    """Notes what things take when they are saved right after a backward."""

    def __init__(self, directory: Path) -> None:
        self.num_bytes: dict[str, int] = {}
        self._directory = directory

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.global_step == 3:
            small = pl_module.layers[2].bias.grad
            path = self._directory / "model.ckpt"
            trainer.save_checkpoint(path)
            things = {
                "state_dict": pl_module.state_dict(),
                "optimizer": trainer.optimizers[0].state_dict(),
                "checkpoint": torch.load(path, weights_only=False)["state_dict"],
                "gradient": small,
                "gradient_clone": small.clone(),
            }
            for name, thing in things.items():
                torch.save(thing, file := io.BytesIO())
                self.num_bytes[name] = file.tell()
            self.num_bytes["gradient_copy"] = copy.deepcopy(small).untyped_storage().nbytes()


@on_ranks()
@like_torchrun()
def test_what_is_saved_is_as_small_as_with_ddp(tmp_path: Path) -> None:
    measured = [Sizes(tmp_path), Sizes(tmp_path)]
    for strategy, sizes in zip(("bucketddp", "ddp"), measured, strict=True):
        make_trainer(strategy, max_epochs=1, callbacks=sizes).fit(Wide(), loader())
    assert measured[0].num_bytes == measured[1].num_bytes
    assert len(measured[0].num_bytes) == 6
