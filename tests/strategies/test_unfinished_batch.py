"""A run that fails within a batch, and is resumed, counts that batch once: in buffers and in random numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, callbacks, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.strategies.auto_resume import AutoResume
from lightning_bucketddp.strategies.parts import UnfinishedBatch
from tests.support.ranks import on_ranks
from tests.support.scripts.trainers import like_torchrun, make_trainer

# Larger than what is always copied.
LARGE = 2**19


class Accident(Exception):
    pass


class Remembering(LightningModule):
    """Changes buffers in each forward, in all the ways that there are, and draws random numbers."""

    queue: Tensor
    total: Tensor

    def __init__(self, *, fails_in: str = "", fails_at: int = -1, saves_at: int = -1) -> None:
        super().__init__()
        self.layers: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
        self.register_buffer("queue", torch.zeros(LARGE))
        self.register_buffer("table", torch.ones(LARGE))
        self.register_buffer("total", torch.zeros(()))
        self._fails_in, self._fails_at, self._saves_at = fails_in, fails_at, saves_at

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.total = self.total + batch[0].sum()
        self.queue.data[batch_idx] += 1
        outputs: Tensor = self.layers(batch[0])
        self._fail("forward", batch_idx)
        outputs.register_hook(lambda _: self._fail("backward", batch_idx))
        return outputs.square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._saves_at:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "here.ckpt")
        self._fail("callbacks", batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._fail("validation", batch_idx)

    def _fail(self, where: str, batch_idx: int) -> None:
        if (where, batch_idx) == (self._fails_in, self._fails_at):
            raise Accident

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(
    directory: Path, module: Remembering, *, accumulate: int, ckpt_path: Path | None = None, averages: bool = False
) -> dict[str, Tensor]:
    AutoResume.num_fits_ended.clear()  # as a new process
    seed_everything(3)
    for param in module.parameters():
        nn.init.uniform_(param, -0.5, 0.5)
    saving: list[Any] = [OnExceptionCheckpoint(directory / "saved"), ModelCheckpoint(directory / "saved")]
    trainer = make_trainer(
        BucketDDPStrategy(auto_resume=True, rank_seeds=True),
        max_epochs=1,
        default_root_dir=directory,
        enable_checkpointing=True,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
        callbacks=saving + ([callbacks.WeightAveraging()] if averages else []),
    )
    inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(inputs), batch_size=4)
    trainer.fit(module, loader, loader if averages else None, ckpt_path=ckpt_path)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize(
    ("fails_in", "accumulate"), [("forward", 1), ("backward", 1), ("callbacks", 1), ("forward", 2)]
)
@on_ranks()
@like_torchrun()
def test_a_batch_that_failed_is_counted_once(fails_in: str, accumulate: int, tmp_path: Path) -> None:
    """Compare a run that is not interrupted with one that fails in its fourth batch of six."""
    undisturbed = fit(tmp_path / "undisturbed", Remembering(), accumulate=accumulate)
    failing = Remembering(fails_in=fails_in, fails_at=3)
    with pytest.raises(Accident):
        fit(tmp_path / "failing", failing, accumulate=accumulate)
    # A program that catches the exception has the module as it was, as with `ddp`.
    assert failing.layers[1].num_batches_tracked == 4
    resumed = fit(tmp_path / "failing", Remembering(), accumulate=accumulate)
    assert undisturbed["layers.1.num_batches_tracked"] == 6
    differing = [name for name, tensor in undisturbed.items() if not torch.equal(tensor, resumed[name])]
    assert differing == []


# Lightning before 2.6 has no `WeightAveraging`.
@pytest.mark.parametrize("averages", [False, True] if hasattr(callbacks, "WeightAveraging") else [False])
@on_ranks()
@like_torchrun()
def test_micro_batches_before_a_checkpoint_that_are_repeated_are_counted_once(averages: bool, tmp_path: Path) -> None:
    """Compare a run that saves between two steps with one that goes on from there."""
    undisturbed = fit(tmp_path / "undisturbed", Remembering(saves_at=4), accumulate=3, averages=averages)
    path = tmp_path / "undisturbed" / "here.ckpt"
    resumed = fit(tmp_path / "resumed", Remembering(), accumulate=3, ckpt_path=path, averages=averages)
    assert torch.load(path, weights_only=True)["bucketddp"]["position"]["num_batches"] == 3
    differing = [name for name, tensor in undisturbed.items() if not torch.equal(tensor, resumed[name])]
    assert differing == []


@pytest.mark.skipif(not hasattr(callbacks, "WeightAveraging"), reason="of Lightning 2.6")
@on_ranks()
@like_torchrun()
def test_a_validation_of_averages_that_fails_leaves_weights_and_averages_in_their_places(tmp_path: Path) -> None:
    undisturbed = fit(tmp_path / "undisturbed", Remembering(), accumulate=1, averages=True)
    with pytest.raises(Accident):
        fit(tmp_path / "failing", Remembering(fails_in="validation", fails_at=0), accumulate=1, averages=True)
    resumed = fit(tmp_path / "failing", Remembering(), accumulate=1, averages=True)
    differing = [name for name, tensor in undisturbed.items() if not torch.equal(tensor, resumed[name])]
    assert differing == []


def unfinished_batch(module: nn.Module) -> UnfinishedBatch:
    progress = SimpleNamespace(current=SimpleNamespace(ready=1, completed=0))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    trainer: Any = SimpleNamespace(fit_loop=loop, lightning_module=SimpleNamespace(automatic_optimization=True))
    position: Any = SimpleNamespace(num_batches_trained=lambda: None)
    return UnfinishedBatch(trainer, module, position, device=None)


def test_micro_batches_that_lightning_counts_as_done_stay() -> None:
    module = nn.BatchNorm1d(2)
    batch = unfinished_batch(module)
    for number in (1, 2):
        batch.begin_batch(number)
        batch.before_forward()
        module(torch.randn(4, 2))
    batch.is_interrupted = True
    checkpoint = {"state_dict": module.state_dict()}
    batch.undo_in(checkpoint)
    assert checkpoint["state_dict"]["num_batches_tracked"] == 1
    assert module.num_batches_tracked == 2
