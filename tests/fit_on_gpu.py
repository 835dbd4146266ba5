"""Trainer runs on a GPU, `ddp` beside `bucketddp`; one rank per process, started by `tests.run_on_gpu`.

Each rank is a node of its own with one device, so that two of them can share a GPU.
"""

from __future__ import annotations

import sys
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_bucketddp  # noqa: F401 (registers, where the package is not installed)

SCENARIOS: dict[str, dict[str, Any]] = {
    "32-true": {"precision": "32-true", "gradient_clip_val": 0.1},
    "bf16-mixed": {"precision": "bf16-mixed", "accumulate_grad_batches": 3},
    "16-mixed": {"precision": "16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "sync_batchnorm": {"sync_batchnorm": True},
}
# Half precision is averaged in another order of roundings than torch DDP's.
TOLERANCE = {"bf16-true": 2e-2}


class Convolutional(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4)
        )
        self.unused = nn.Linear(3, 3)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("validation", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


def fit(strategy: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], pl.Trainer]:
    pl.seed_everything(1)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 3, 8, 8, generator=generator), torch.randint(0, 4, (64,), generator=generator))
    model = Convolutional()
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        num_nodes=2,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        deterministic="warn",
        **options,
    )
    trainer.fit(model, DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
    return {**model.state_dict(), "validation": trainer.callback_metrics["validation"]}, trainer


def main() -> None:
    failed = 0
    for name, options in SCENARIOS.items():
        ours, trainer = fit("bucketddp", options)
        theirs, _ = fit("ddp_find_unused_parameters_true", options)
        apart = max(float((ours[key].float().cpu() - theirs[key].float().cpu()).abs().max()) for key in theirs)
        good = apart <= TOLERANCE.get(name, 1e-5) and ours.keys() == theirs.keys()
        failed += not good
        if trainer.is_global_zero:
            print(
                f"{'passed' if good else 'FAILED'} Trainer {name}: at most {apart:.1e} from ddp; "
                f"{trainer.strategy.reducer.describe()}",
                flush=True,
            )
    sys.exit(failed)


if __name__ == "__main__":
    main()
