"""Options of the Trainer that change its loops do the same with `bucketddp` as with `ddp`, on two processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.ranks import on_ranks
from tests.support.scripts.models import Regression, loader
from tests.support.scripts.trainers import like_torchrun, make_trainer, ours_and_ddp


class Data(LightningDataModule):
    """Counts how often it is asked for batches, and gives larger ones each time."""

    def __init__(self) -> None:
        super().__init__()
        self.num_train_loaders = 0

    def train_dataloader(self) -> DataLoader[Any]:
        self.num_train_loaders += 1
        return loader(batch_size=3 + self.num_train_loaders)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader()


class Watching(Regression):
    """Notes what it is given, and in which mode."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[float] = []
        self.is_inference: set[bool] = set()
        self.validated_at: list[int] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.batches.append(batch[0].sum().item())
        return super().training_step(batch)

    def validation_step(self, batch: list[Tensor]) -> None:
        self.is_inference.add(torch.is_inference_mode_enabled())
        super().validation_step(batch)

    def on_validation_epoch_start(self) -> None:
        self.validated_at.append(self.global_step)


class Averaging(Watching):
    """Trains, and validates, with a mean of what it has seen: a buffer, which ranks have each their own of at times."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.seen = 0.9 * self.seen + 0.1 * batch[0].mean()
        return super().training_step(batch) * (1 + self.seen)

    def validation_step(self, batch: list[Tensor]) -> None:
        super().validation_step(batch)
        self.batches.append(float(self.seen))


class Scheduled(Watching):
    """Has a scheduler of one of the kinds that Lightning steps."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind
        self.rates: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer: Any = self.optimizers()
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedulers = torch.optim.lr_scheduler
        if self._kind == "one_cycle":
            steps = self.trainer.estimated_stepping_batches
            scheduler: Any = schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(steps))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}


@dataclass(frozen=True)
class Loops:
    """What the Trainer is given, and the module that it trains."""

    options: dict[str, Any] = field(default_factory=dict)
    module: Callable[[], LightningModule] = Watching
    epochs: int | None = 2


LOOPS = {
    "overfit_batches": Loops({"overfit_batches": 3}),
    "fast_dev_run": Loops({"fast_dev_run": 3}, epochs=None),
    "limits": Loops({"limit_train_batches": 0.5, "limit_val_batches": 2}),
    "max_steps": Loops({"max_steps": 13}, epochs=None),
    "min_epochs": Loops({"min_epochs": 2, "max_steps": 25}, epochs=None),
    "validation_within_epochs": Loops({"val_check_interval": 3, "accumulate_grad_batches": 2}, Averaging),
    "new_loaders_each_epoch": Loops({"reload_dataloaders_every_n_epochs": 1}),
    # Prints nothing, logs nothing, and refuses what the quiet Trainer of the tests says anyway.
    "barebones": Loops({"barebones": True}),
    "detect_anomaly": Loops({"detect_anomaly": True}),
    "advanced_profiler": Loops({"profiler": "advanced"}, epochs=1),
    "deterministic": Loops({"deterministic": True}),
    "no_inference_mode": Loops({"inference_mode": False}),
    "no_distributed_sampler": Loops({"use_distributed_sampler": False}),
    "one_cycle": Loops({"accumulate_grad_batches": 4}, lambda: Scheduled("one_cycle")),
    "plateau": Loops(module=lambda: Scheduled("plateau"), epochs=4),
}


@like_torchrun()
def train_with_loops(*, loops: str, strategy: str, directory: Path) -> dict[str, Any]:
    """What this rank has at the end, and what it has seen."""
    how = LOOPS[loops]
    torch.manual_seed(dist.get_rank())
    module = how.module()
    data = Data()
    options = {"default_root_dir": directory, "num_sanity_val_steps": 0, **how.options}
    trainer = make_trainer(strategy, max_epochs=how.epochs, **options)
    try:
        trainer.fit(module, data)
    finally:
        torch.use_deterministic_algorithms(False)  # what `deterministic=True` leaves behind
    return {
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "counts": (trainer.global_step, trainer.current_epoch, data.num_train_loaders),
        "seen": (module.batches, module.is_inference, module.validated_at, getattr(module, "rates", None)),
    }


@pytest.mark.parametrize("loops", list(LOOPS))
@pytest.mark.sampled(6)
def test_training_equals_ddp(loops: str, tmp_path: Path) -> None:
    ours, ddp = ours_and_ddp(train_with_loops, loops=loops, directory=tmp_path)
    assert ours == ddp
    assert ours[0]["weights"] == ours[1]["weights"]


@on_ranks()
@like_torchrun()
def test_the_profiler_of_torch_shows_our_phases(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(
        dirpath=tmp_path, filename="profile", schedule=None, export_to_chrome=False, row_limit=1000
    )
    trainer = make_trainer("bucketddp", max_epochs=1, limit_train_batches=2, profiler=profiler)
    trainer.fit(Regression(), loader())
    text = (tmp_path / f"fit-profile-{dist.get_rank()}.txt").read_text()
    phases = sorted({word for word in text.split() if word.startswith("bucketddp::")})
    assert phases == ["bucketddp::finish", "bucketddp::launch"]


@on_ranks()
@like_torchrun()
def test_a_run_resumed_within_an_epoch_equals_ddp(tmp_path: Path) -> None:
    """Two epochs, stopped in the middle of the first, go on in another Trainer."""
    outcomes = []
    for strategy in ("bucketddp", "ddp"):
        saving = ModelCheckpoint(tmp_path / strategy, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        torch.manual_seed(dist.get_rank())
        make_trainer(strategy, max_steps=8, callbacks=saving, enable_checkpointing=True).fit(Regression(), loader())
        module, trainer = Watching(), make_trainer(strategy, max_epochs=2)
        trainer.fit(module, loader(), ckpt_path=tmp_path / strategy / "step=6.ckpt")
        weights = {name: value.tolist() for name, value in module.state_dict().items()}
        outcomes.append((weights, module.batches, trainer.global_step))
    assert outcomes[0] == outcomes[1]
    assert len(module.batches) == 4 + 10
