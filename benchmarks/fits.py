"""Training through the real Trainer, as a user does it."""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_bucketddp
from benchmarks.comm_hooks import HOOKS
from benchmarks.loop import OPTIMIZERS, LoopSettings
from benchmarks.models import Workload, build
from benchmarks.ranks import synchronize
from benchmarks.variants import Variant

pl = import_module("lightning.pytorch" if find_spec("lightning") is not None else "pytorch_lightning")


class Fits:
    """Variants that take turns, each turn a fit. A fit begins with steps that are not measured."""

    def __init__(self, settings: LoopSettings, device: torch.device) -> None:
        for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_bucketddp"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._settings = settings
        self._device = device
        self._variants = {variant.name: variant for variant in settings.variants}
        self._modules: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory()

    def turn(self, name: str) -> float:
        """Seconds per step."""
        settings, variant = self._settings, self._variants[name]
        # Where its tensors happen to lie makes one module faster than another: one for all that only differ in what
        # looks at them.
        key = repr(replace(variant, name="", records_every=None))
        if key not in self._modules:
            self._modules[key] = _Module(build(settings.model, self._device), variant, settings)
        num_unmeasured = variant.steps_to_settle * settings.accumulate
        num_batches = num_unmeasured + settings.steps * settings.accumulate
        stopwatch = _Stopwatch(self._device, first=num_unmeasured, last=num_batches)
        trainer = pl.Trainer(
            accelerator="gpu" if self._device.type == "cuda" else "cpu",
            devices=[self._device.index] if self._device.type == "cuda" else 1,
            num_nodes=1 if variant.kind == "alone" else dist.get_world_size(),
            strategy=_strategy(variant, self._device),
            accumulate_grad_batches=settings.accumulate,
            max_epochs=1,
            callbacks=[stopwatch, *self._monitors(variant)],
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        # One more, at the beginning of which the last measured step has ended.
        trainer.fit(self._modules[key], DataLoader(range(num_batches + 1)))
        start, end = stopwatch.times
        return (end - start) / settings.steps

    def _monitors(self, variant: Variant) -> list[Any]:
        if variant.records_every is None:
            return []
        monitor = lightning_bucketddp.BucketDDPMonitor
        return [monitor(every_n_steps=variant.records_every, dirpath=self._folder.name, summary=False)]


def _strategy(variant: Variant, device: torch.device) -> Any:
    if variant.kind == "alone":
        return pl.strategies.SingleDeviceStrategy(device=device)
    options = dict(variant.options)
    if variant.hook:
        options["ddp_comm_hook"], options["ddp_comm_state"] = HOOKS[variant.hook]()
    kind = lightning_bucketddp.BucketDDPStrategy if variant.kind == "ours" else pl.strategies.DDPStrategy
    return kind(**options)


class _Module(pl.LightningModule):  # type: ignore[name-defined,misc]
    def __init__(self, workload: Workload, variant: Variant, settings: LoopSettings) -> None:
        super().__init__()
        self.model = workload.model
        self._workload = workload
        self._unused = variant.unused
        self._accumulate = settings.accumulate
        self._optimizer = settings.optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._workload.leave_out(self._unused, batch_idx // self._accumulate)
        return self._workload.loss(self.model)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self._optimizer](self.parameters())


class _Stopwatch(pl.Callback):  # type: ignore[name-defined,misc]
    """When two batches began, with everything before them done."""

    def __init__(self, device: torch.device, *, first: int, last: int) -> None:
        self._device = device
        self._batches = (first, last)
        self.times: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self._batches:
            synchronize(self._device)
            self.times.append(time.perf_counter())
