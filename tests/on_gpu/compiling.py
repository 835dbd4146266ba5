"""A compiled model on a GPU beside an eager one; one rank per process, started by `tests.on_gpu.suite`."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp.bindings.trainer_pytorch_lightning import BucketDDPStrategy
from lightning_bucketddp.reducer.launch_queue import LaunchQueue
from tests.on_gpu.fit import distance

WIDTH = 1024
# TF32 and other fusions round differently.
ROUNDING = 1e-3


class Wide(pl.LightningModule):
    """32 MiB of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)])

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Parts:
    """inductor as a backend, counting the graphs that it is given."""

    def __init__(self) -> None:
        self.num_parts = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num_parts += 1
        return compile_fx(graph, inputs)


def fit(parts: Parts | None) -> tuple[dict[str, Tensor], list[float]]:
    """Weights, and how long before the end of the last backward each bucket left, in ms by the device's clock."""
    pl.seed_everything(1)
    data = TensorDataset(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)))
    strategy = BucketDDPStrategy(bucket_cap_mb=8)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="gpu", devices=1, num_nodes=2, strategy=strategy, max_epochs=1, **options)
    module = Wide()
    launches: list[torch.cuda.Event] = []
    ends: list[torch.cuda.Event] = []
    launch, wait = LaunchQueue._launch_next, LaunchQueue.wait

    def observed_launch(reductions: LaunchQueue) -> None:
        if reductions.next_to_launch == 0:
            launches.clear()
        launches.append(_event())
        launch(reductions)

    def observed_wait(reductions: LaunchQueue, **options: Any) -> None:
        ends.append(_event())
        wait(reductions, **options)

    with patch.object(LaunchQueue, "_launch_next", observed_launch), patch.object(LaunchQueue, "wait", observed_wait):
        trainer.fit(module if parts is None else torch.compile(module, backend=parts), DataLoader(data, batch_size=4))
    torch.cuda.synchronize()
    return dict(module.state_dict()), [launch.elapsed_time(ends[-1]) for launch in launches]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def main() -> None:
    parts = Parts()
    compiled, before_end = fit(parts)
    eager, _ = fit(None)
    apart = distance(compiled, eager)
    # Each part has a backward of its own, and hands over its gradients when that ends.
    good = apart <= ROUNDING and parts.num_parts > 2 and len(before_end) > 2
    if dist.get_rank() == 0:
        times = ", ".join(f"{ms:.2f}" for ms in before_end)
        print(
            f"\n{'passed' if good else 'FAILED'} compiled in {parts.num_parts} parts: at most {apart:.1e} from eager;"
            f" buckets left {times} ms before backward ended",
            flush=True,
        )
    sys.exit(not good)


if __name__ == "__main__":
    main()
