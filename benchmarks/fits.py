"""Training through the real Trainer, as a user does it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from queue import SimpleQueue
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecision
from torch.utils.data import DataLoader

import lightning_bucketddp
from benchmarks.comm_hooks import HOOKS
from benchmarks.loop import OPTIMIZERS, LoopSettings
from benchmarks.models import Layer, Workload, build
from benchmarks.ranks import NUM_RANKS, synchronize
from benchmarks.variants import Variant
from lightning_bucketddp.reducer.bucket import BufferedBucket

pl = import_module("lightning.pytorch" if find_spec("lightning") is not None else "pytorch_lightning")


_ENDLESS = 10**9


class Fits:
    """Variants that take turns, each turn a fit. A fit begins with steps that are not measured."""

    def __init__(self, settings: LoopSettings, device: torch.device) -> None:
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
            self._modules[key] = self._module(variant)
        num_unmeasured = variant.steps_to_settle * settings.accumulate
        num_batches = num_unmeasured + settings.steps * settings.accumulate
        stopwatch = _Stopwatch(self._device, first=num_unmeasured, last=num_batches)
        # One more, at the beginning of which the last measured step has ended.
        self._trainer(variant, stopwatch).fit(self._modules[key], DataLoader(range(num_batches + 1)))
        start, end = stopwatch.times
        return (end - start) / settings.steps

    def _module(self, variant: Variant) -> _Module:
        workload = build(self._settings.model, self._device, samples=self._settings.samples)
        kind = _FSDP2Module if variant.kind == "fsdp2" else _Module
        return kind(workload, variant, self._settings)

    def _trainer(self, variant: Variant, callback: Any) -> Any:
        return pl.Trainer(
            accelerator="gpu" if self._device.type == "cuda" else "cpu",
            devices=[self._device.index] if self._device.type == "cuda" else 1,
            num_nodes=1 if variant.kind == "alone" else int(os.environ[NUM_RANKS]),
            strategy=_strategy(variant, self._device),
            accumulate_grad_batches=self._settings.accumulate,
            max_epochs=1,
            callbacks=[callback, *self._monitors(variant)],
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def _monitors(self, variant: Variant) -> list[Any]:
        if variant.records_every is None:
            return []
        monitor = lightning_bucketddp.BucketDDPMonitor
        return [monitor(every_n_steps=variant.records_every, dirpath=self._folder.name, summary=False)]


_collect = BufferedBucket.collect


def _collect_in_new_memory(bucket: BufferedBucket) -> list[int]:
    if all(param.grad is not view for param, view in zip(bucket.params, bucket.views, strict=True)):
        bucket._allocate()
    return _collect(bucket)


class OpenFits(Fits):
    """Variants that take turns, each a fit that waits between its turns and so has to settle only once."""

    def __init__(self, settings: LoopSettings, device: torch.device) -> None:
        super().__init__(settings, device)
        self._open: dict[str, _Breaks] = {}

    def turn(self, name: str) -> float:
        """Seconds per step."""
        is_new = name not in self._open
        breaks = self._opened(self._variants[name]) if is_new else self._open[name]
        # What others have driven out of the caches comes back in a step that is not measured.
        num_unmeasured = self._variants[name].steps_to_settle if is_new else 1
        accumulate, steps = self._settings.accumulate, self._settings.steps
        collect = _collect_in_new_memory if self._variants[name].takes_memory else _collect
        with patch.object(BufferedBucket, "collect", collect):
            return breaks.go_on(_Turn(num_unmeasured * accumulate, steps * accumulate)) / steps

    def environment(self, names: Sequence[str]) -> dict[str, str]:
        """The variables of these names, as far as they are set."""
        return {name: os.environ[name] for name in names if name in os.environ}

    def close(self) -> None:
        """End all fits, in the same order on every rank."""
        while self._open:
            self._open.pop(next(iter(self._open))).end()

    def _opened(self, variant: Variant) -> _Breaks:
        module = self._module(variant)
        breaks = self._open[variant.name] = _Breaks(self._device)
        trainer = self._trainer(variant, breaks)
        breaks.begin(lambda: trainer.fit(module, DataLoader(range(_ENDLESS))))
        return breaks


class MainThreadFit(Fits):
    """One variant, in a fit that waits between its turns, in the main thread.

    CUDA graphs of `torch.compile` fail in other threads before torch 2.13 (pytorch#123177).
    """

    pause: Callable[[Any], Any] = staticmethod(lambda value: None)

    def turn(self, num_unmeasured: int, num_measured: int) -> Measured:
        """Make the first turn, and the others from within it."""
        [variant] = self._settings.variants
        turns = _MainThreadTurns(self._device, _Turn(num_unmeasured, num_measured), self.pause)
        self._trainer(variant, turns).fit(self._module(variant), DataLoader(range(_ENDLESS)))
        raise SystemExit  # nobody waits for an answer


def _strategy(variant: Variant, device: torch.device) -> Any:
    if variant.kind == "alone":
        return pl.strategies.SingleDeviceStrategy(device=device)
    if variant.kind == "fsdp2":
        return pl.strategies.ModelParallelStrategy()
    options = dict(variant.options)
    if variant.kind == "fsdp":
        weights, gradients = options.pop("wires")
        return pl.strategies.FSDPStrategy(
            auto_wrap_policy={Layer}, mixed_precision=MixedPrecision(weights, gradients, weights), **options
        )
    if variant.hook:
        options["ddp_comm_hook"], options["ddp_comm_state"] = HOOKS[variant.hook]()
    kind = lightning_bucketddp.BucketDDPStrategy if variant.kind == "ours" else pl.strategies.DDPStrategy
    return kind(**options)


class _Module(pl.LightningModule):  # type: ignore[name-defined,misc]
    def __init__(self, workload: Workload, variant: Variant, settings: LoopSettings) -> None:
        super().__init__()
        self.model = workload.model
        if variant.compiled is not None:
            self.model.compile(mode=variant.compiled)
        self._unused = variant.unused
        self._workload = workload
        self._accumulate = settings.accumulate
        self._optimizer = settings.optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self._unused != "none":
            self._workload.leave_out(self._unused, batch_idx // self._accumulate)
        return self._workload.loss(self.model)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self._optimizer](self.parameters())


class _FSDP2Module(_Module):
    def __init__(self, workload: Workload, variant: Variant, settings: LoopSettings) -> None:
        super().__init__(workload, variant, settings)
        self._options = variant.options

    def configure_model(self) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # not in the oldest torch

        for module in [*(layer for layer in self.model.modules() if isinstance(layer, Layer)), self.model]:
            fully_shard(
                module,
                mesh=self.device_mesh["data_parallel"],
                mp_policy=MixedPrecisionPolicy(*self._options["wires"]),
                reshard_after_forward=self._options["reshard_after_forward"],
            )


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


@dataclass(frozen=True)
class _Turn:
    """So many batches, of which the last ones are measured."""

    num_unmeasured: int
    num_measured: int


@dataclass(frozen=True)
class Measured:
    """The seconds of a turn, and the most bytes of tensors that were on the GPU during it; 0 on a CPU."""

    seconds: float
    peak: int


class _InTurns(pl.Callback):  # type: ignore[name-defined,misc]
    """A fit that stops between two batches, when a turn is over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first = self._last = 0  # batches of a turn that are measured
        self._began_at = 0.0

    def next_turn(self, seconds: float | None) -> _Turn | None:
        """Wait for the next turn, None: there is none. The last one took so long, None: there was none."""
        raise NotImplementedError

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._last:
            synchronize(self._device)
            turn = self.next_turn(time.perf_counter() - self._began_at if batch_idx > 0 else None)
            if turn is None:
                trainer.should_stop = True
                return
            self._first = batch_idx + turn.num_unmeasured
            self._last = self._first + turn.num_measured
        if batch_idx == self._first:
            synchronize(self._device)
            self._began_at = time.perf_counter()


class _MainThreadTurns(_InTurns):
    """Turns that are asked for through `pause`."""

    def __init__(self, device: torch.device, first: _Turn, pause: Callable[[Any], Any]) -> None:
        super().__init__(device)
        self._first_turn = first
        self._pause = pause

    def next_turn(self, seconds: float | None) -> _Turn | None:
        if seconds is None:
            return self._first_turn
        uses_gpu = self._device.type == "cuda"
        asked = self._pause(Measured(seconds, torch.cuda.max_memory_allocated() if uses_gpu else 0))
        if uses_gpu:
            torch.cuda.reset_peak_memory_stats()
        return None if asked is None else _Turn(*asked)


class _Breaks(_InTurns):
    """A fit in a thread of its own. One thread runs while the others wait."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._orders: SimpleQueue[_Turn | None] = SimpleQueue()
        self._answers: SimpleQueue[float | BaseException | None] = SimpleQueue()

    def begin(self, fit: Callable[[], None]) -> None:
        """Start the thread; it waits for the first turn when it comes to the first batch."""

        def run() -> None:
            try:
                fit()
                self._answers.put(None)
            except BaseException as error:  # raised where the turn was asked for
                self._answers.put(error)

        self._thread = Thread(target=run, daemon=True)
        self._thread.start()

    def go_on(self, turn: _Turn | None) -> float:
        """Train until `turn` is over, None: until the fit is; return seconds of what is measured."""
        self._orders.put(turn)
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise RuntimeError("A fit failed.") from answer
        return answer or 0.0

    def end(self) -> None:
        """End the fit as Lightning ends it."""
        if self._thread.is_alive():
            self.go_on(None)
            self._thread.join()

    def next_turn(self, seconds: float | None) -> _Turn | None:
        if seconds is not None:
            self._answers.put(seconds)
        return self._orders.get()
