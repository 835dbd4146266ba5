"""Trainer runs on a GPU with and without `shard_optimizer`; one rank per process, started by `tests.on_gpu.suite`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp.bindings.trainer_pytorch_lightning import BucketDDPStrategy
from tests.on_gpu.fit import distance


class Deep(pl.LightningModule):
    def __init__(self, *, compiled: str = "") -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)
        )
        self._run = torch.compile(self.layers) if compiled == "forward" else self.layers
        self._compiled = compiled

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self._run(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        if self._compiled == "step":
            optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
            return optimizer  # a scheduler of torch's cannot wrap that
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


Weights = dict[str, Tensor]


def fit(
    *,
    shard: Any,
    max_epochs: int = 2,
    ckpt_path: str | None = None,
    precision: Any = "32-true",
    compiled: str = "",
    strategy: Any = None,
    **options: Any,
) -> tuple[Weights, pl.Trainer]:
    pl.seed_everything(1)
    data = TensorDataset(torch.randn(64, 32, generator=torch.Generator().manual_seed(1)))
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        num_nodes=2,
        strategy=strategy or BucketDDPStrategy(shard_optimizer=shard, bucket_cap_mb=0.1),
        max_epochs=max_epochs,
        deterministic=True,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **options,
    )
    module = Deep(compiled=compiled)
    trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=ckpt_path)
    return {name: value.clone() for name, value in module.state_dict().items()}, trainer


def say(good: bool, text: str) -> bool:
    if dist.get_rank() == 0:
        print(f"{'passed' if good else 'FAILED'} {text}", flush=True)
    return good


def same_weights() -> bool:
    good = True
    settings: dict[str, dict[str, Any]] = {
        "fp32": {},
        "clipped": {"gradient_clip_val": 0.01},
        "bf16-mixed": {"precision": "bf16-mixed"},
        "GradScaler": {"precision": "16-mixed", "gradient_clip_val": 0.1},
        "accumulated": {"accumulate_grad_batches": 2},
        "compiled forward": {"compiled": "forward"},
        "compiled step": {"compiled": "step"},
    }
    for name, setting in settings.items():
        whole, _ = fit(shard=False, **setting)
        for shard in (True, "parameters"):
            sharded, trainer = fit(shard=shard, **setting)
            apart = distance(sharded, whole)
            good &= say(
                apart < 1e-5, f"sharded {shard}, {name}: {apart:.1e} apart; {trainer.strategy.shards.describe()}"
            )
    return good


def checkpoints() -> bool:
    """A run that is sharded, saved, resumed by ddp, saved, and resumed sharded goes on like one without a break."""
    uninterrupted, _ = fit(shard=False, max_epochs=3)
    _, trainer = fit(shard=True, max_epochs=1)
    directory = Path(trainer.strategy.broadcast(tempfile.mkdtemp()))
    trainer.save_checkpoint(directory / "1.ckpt")
    _, trainer = fit(shard=False, max_epochs=2, ckpt_path=str(directory / "1.ckpt"), strategy="ddp")
    trainer.save_checkpoint(directory / "2.ckpt")
    resumed, _ = fit(shard=True, max_epochs=3, ckpt_path=str(directory / "2.ckpt"))
    apart = distance(resumed, uninterrupted)
    on_disk = torch.load(directory / "1.ckpt", map_location="cpu", weights_only=False)["optimizer_states"][0]["state"]
    is_whole = [state["exp_avg"].shape for state in on_disk.values()] == [p.shape for p in Deep().parameters()]
    return say(apart < 1e-5 and is_whole, f"sharded, saved, resumed by ddp and sharded again: {apart:.1e} apart")


def main() -> None:
    good = same_weights() & checkpoints()
    sys.exit(not good)


if __name__ == "__main__":
    main()
