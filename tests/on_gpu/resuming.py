"""A Trainer run on a GPU, once in one go and once interrupted; one rank per process, started by `tests.on_gpu.suite`.

Dropout draws from each rank's own CUDA generator, and PowerSGD owes each rank an error of its own: both must go on.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp.bindings.trainer_pytorch_lightning import BucketDDPStrategy
from tests.on_gpu.fit import distance, power_sgd


class Dropping(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(max_epochs: int, ckpt_path: str | None = None) -> tuple[dict[str, Tensor], pl.Trainer]:
    pl.seed_everything(1)
    data = TensorDataset(torch.randn(64, 32, generator=torch.Generator().manual_seed(1)))
    strategy = BucketDDPStrategy(
        rank_seeds=True, ddp_comm_hook=powerSGD_hook.powerSGD_hook, ddp_comm_state=power_sgd(), bucket_cap_mb=0.01
    )
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        num_nodes=2,
        strategy=strategy,
        max_epochs=max_epochs,
        deterministic=True,
        **options,
    )
    module = Dropping()
    trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=ckpt_path)
    return {name: value.clone() for name, value in module.state_dict().items()}, trainer


def main() -> None:
    uninterrupted, _ = fit(4)
    _, trainer = fit(2)
    directory = trainer.strategy.broadcast(tempfile.mkdtemp())
    path = str(Path(directory) / "last.ckpt")
    trainer.save_checkpoint(path)
    resumed, _ = fit(4, ckpt_path=path)
    without_checkpoint, _ = fit(2)
    apart = distance(resumed, uninterrupted)
    # The comparison can fail: other random numbers lead elsewhere.
    good = apart == 0 and distance(without_checkpoint, uninterrupted) > 0
    if dist.get_rank() == 0:
        print(f"\n{'passed' if good else 'FAILED'} resumed run: {apart:.1e} from an uninterrupted one", flush=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
