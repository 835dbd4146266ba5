"""The memory that a step needs: at its peak, and between two steps."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.loop import LoopSettings, Training

_STEP = "benchmarks::measured step"
_FORWARD = "benchmarks::begin of forward"
_REPETITIONS_ON_CPU = 3
_FREED_WITHIN_S = 5.0


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors that one variant needs.

    Attributes:
        peak: the most that there are at a time in a steady step.
        kept: what there is when its forward begins: the gradients of the last step are gone, its buckets may be not.
    """

    peak: int
    kept: int


class Peaks:
    """Variants whose steps are measured one after the other, with nothing of the others left in memory."""

    def __init__(self, settings: LoopSettings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._variants = {variant.name: variant for variant in settings.variants}

    def peak(self, name: str, micro_batches: int) -> int:
        """The peak of a variant."""
        return self.memory(name, micro_batches).peak

    def memory(self, name: str, micro_batches: int) -> Memory:
        """What a variant needs, with the model and what it is given."""
        if self._device.type == "cuda":
            return self._memory_on_gpu(name, micro_batches)
        # The profiler misses what a thread of gloo's happens to free. It then shows too much, never too little.
        found = [self._memory_on_cpu(name, micro_batches) for _ in range(_REPETITIONS_ON_CPU)]
        return Memory(min(memory.peak for memory in found), min(memory.kept for memory in found))

    def driver_allocations(self, name: str, num_steps: int) -> int | None:
        """How often the driver is asked for memory in steady steps of a variant; None where there is no GPU."""
        if self._device.type != "cuda":
            return None
        with self._training(name, micro_batches=1) as training:
            before = _driver_allocations()
            for _ in range(num_steps):
                training.step()
            torch.cuda.synchronize()
            return _driver_allocations() - before

    def gradient_bytes(self) -> int:
        """The size of all gradients."""
        alone = Training(self._settings, self._settings.variants[0], self._device)
        return sum(param.nbytes for param in alone.workload.model.parameters())

    @contextmanager
    def _training(self, name: str, *, micro_batches: int) -> Iterator[Training]:
        """A training in its steady state."""
        training = Training(replace(self._settings, accumulate=micro_batches), self._variants[name], self._device)
        for _ in range(training.variant.steps_to_settle):
            training.step()
        yield training
        if training.attached.reducer is not None:
            training.attached.reducer.close()

    def _memory_on_gpu(self, name: str, micro_batches: int) -> Memory:
        before = _bytes_after_freeing()
        kept: list[int] = []
        with self._training(name, micro_batches=micro_batches) as training:
            on_forward(training, lambda: kept.append(torch.cuda.memory_allocated()))
            torch.cuda.reset_peak_memory_stats()
            training.step()
            torch.cuda.synchronize()
            return Memory(torch.cuda.max_memory_allocated() - before, kept[0] - before)

    def _memory_on_cpu(self, name: str, micro_batches: int) -> Memory:
        gc.collect()
        with _profiled() as events, self._training(name, micro_batches=micro_batches) as training:
            on_forward(training, _mark_forward)
            with record_function(_STEP):
                training.step()
        annotations = [event for event in events if event.get("cat") == "user_annotation"]
        [step] = [event for event in annotations if event["name"] == _STEP]
        forward = min(event["ts"] for event in annotations if event["name"] == _FORWARD)
        changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
        held = peak = kept = 0
        for at, change in changes:
            held += change
            if at <= forward:
                kept = held
            if step["ts"] <= at <= step["ts"] + step["dur"]:
                peak = max(peak, held)
        return Memory(peak, kept)


def on_forward(training: Training, call: Callable[[], None]) -> None:
    """Call when a forward begins, after all that the variant does then."""
    training.workload.model.register_forward_pre_hook(lambda module, args: call())


def _mark_forward() -> None:
    with record_function(_FORWARD):
        pass


def _bytes_after_freeing() -> int:
    """What is on the device once all is freed that nobody needs.

    What another stream has used is freed when the allocator next looks, and what NCCL holds when its own thread does:
    in the middle of the next measurement, if that does not wait.
    """
    deadline = time.monotonic() + _FREED_WITHIN_S
    held = None
    while held != (now := _freed()) and time.monotonic() < deadline:
        held = now
        time.sleep(0.3)
    return now


def _freed() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def _driver_allocations() -> int:
    stats = torch.cuda.memory_stats()
    return int(stats.get("num_device_alloc", stats["segment.all.allocated"]))


@contextmanager
def _profiled() -> Iterator[list[dict[str, Any]]]:
    """A list that has the events of the profiler at the end."""
    events: list[dict[str, Any]] = []
    profiled = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _silence():
        profiled.start()
    yield events
    with _silence():
        profiled.stop()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "trace.json"
        profiled.export_chrome_trace(str(file))
        events += json.loads(file.read_text())["traceEvents"]


@contextmanager
def _silence() -> Iterator[None]:
    """Drop what is written to the error output: the profiler tells when it starts and stops."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
