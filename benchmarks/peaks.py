"""The most memory that a step needs at a time."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.loop import LoopSettings, Training

_MEASURED = "benchmarks::measured step"
_REPETITIONS_ON_CPU = 3


class Peaks:
    """Variants whose steps are measured one after the other, with nothing of the others left in memory."""

    def __init__(self, settings: LoopSettings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._variants = {variant.name: variant for variant in settings.variants}

    def peak(self, name: str, micro_batches: int) -> int:
        """Bytes of tensors in a steady step, with the model and what it was given."""
        settings = replace(self._settings, accumulate=micro_batches)

        def train(mark: Callable[[], None]) -> None:
            training = Training(settings, self._variants[name], self._device)
            for _ in range(training.variant.steps_to_settle):
                training.step()
            mark()
            with record_function(_MEASURED):
                training.step()
            if training.attached.reducer is not None:
                training.attached.reducer.close()

        gc.collect()
        if self._device.type == "cuda":
            return _peak_on_gpu(train)
        # The profiler misses what a thread of gloo's happens to free. It then shows too much, never too little.
        return min(_peak_on_cpu(train) for _ in range(_REPETITIONS_ON_CPU))

    def gradient_bytes(self) -> int:
        """The size of all gradients."""
        alone = Training(self._settings, self._settings.variants[0], self._device)
        return sum(param.nbytes for param in alone.workload.model.parameters())


def _peak_on_gpu(train: Callable[[Callable[[], None]], None]) -> int:
    before = torch.cuda.memory_allocated()
    train(torch.cuda.reset_peak_memory_stats)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


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


def _peak_on_cpu(train: Callable[[Callable[[], None]], None]) -> int:
    profiled = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _silence():
        profiled.start()
    train(lambda: None)
    with _silence():
        profiled.stop()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "trace.json"
        profiled.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    [step] = [event for event in events if event["name"] == _MEASURED and event.get("cat") == "user_annotation"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    held = peak = 0
    for at, change in changes:
        held += change
        if step["ts"] <= at <= step["ts"] + step["dur"]:
            peak = max(peak, held)
    return peak
