"""Training in a bare loop, without a Trainer."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.models import build
from benchmarks.ranks import synchronize
from benchmarks.variants import Variant, attach

# By which the ranks of one machine talk, also those of NCCL if each pretends to be a host of its own.
_INTERFACE = "lo"


@dataclass(frozen=True)
class LoopSettings:
    """What is trained, and how.

    Attributes:
        model: a name in `WORKLOADS`.
        variants: which take turns.
        accumulate: micro-batches in a step.
        steps: measured in a turn, one after the other; the device is waited for only at the ends.
        optimizer: a name in `OPTIMIZERS`.
        samples: in a batch; None: as many as the model has by default.
    """

    model: str
    variants: tuple[Variant, ...]
    accumulate: int = 1
    steps: int = 5
    optimizer: str = "sgd"
    samples: int | None = None


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-4, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=True),
}


class Training:
    """A model that is being trained by one variant."""

    def __init__(self, settings: LoopSettings, variant: Variant, device: torch.device) -> None:
        self.variant = variant
        self.workload = build(settings.model, device, samples=settings.samples)
        self.attached = attach(variant, self.workload.model, device)
        self._optimizer = OPTIMIZERS[settings.optimizer](self.workload.model.parameters())
        if self.attached.shards is not None:
            self.attached.shards.add(self._optimizer)
        self._accumulate = settings.accumulate
        self._num_steps = 0

    @property
    def state_bytes(self) -> int:
        """The size of the optimizer's state."""
        values = [value for state in self._optimizer.state.values() for value in state.values()]
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

    def step(self, mark: Callable[[str], None] = lambda _: None) -> None:
        """`zero_grad`, forward, backward, optimizer. `mark` is called with the name of what has just been done."""
        self.workload.leave_out(self.variant.unused, self._num_steps)
        self._num_steps += 1
        self._optimizer.zero_grad()
        for micro_batch in range(self._accumulate):
            is_last = micro_batch == self._accumulate - 1
            with nullcontext() if is_last else self.attached.no_sync():
                loss = self.workload.loss(self.attached.model)
                mark("forward")
                with self.attached.backward():
                    loss.backward()
                mark("backward")
        self._optimizer.step()
        self.attached.after_step()
        mark("optimizer")


class Loop:
    """Variants that train in turns, each a model of its own."""

    def __init__(self, settings: LoopSettings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._variants = {variant.name: variant for variant in settings.variants}
        self._trainings: dict[str, Training] = {}

    def turn(self, name: str) -> float:
        """Seconds per step."""
        training = self.training(name)
        training.step()  # what others have driven out of the caches comes back
        start = self._now_on_all_ranks()
        for _ in range(self._settings.steps):
            training.step()
        synchronize(self._device)
        return (time.perf_counter() - start) / self._settings.steps

    def training(self, name: str) -> Training:
        """Of the variant of this name, in its steady state."""
        if name not in self._trainings:
            training = Training(self._settings, self._variants[name], self._device)
            for _ in range(training.variant.steps_to_settle):
                training.step()
            self._trainings[name] = training
        return self._trainings[name]

    def state_bytes(self, name: str) -> float:
        """The size of the optimizer's state of a variant."""
        return float(self.training(name).state_bytes)

    def bytes_sent(self, name: str) -> float:
        """Bytes that all ranks together send in a step of a variant, as the kernel counts them."""
        training = self.training(name)
        self._now_on_all_ranks()
        before = bytes_sent_on(_INTERFACE)
        for _ in range(self._settings.steps):
            training.step()
        self._now_on_all_ranks()
        return (bytes_sent_on(_INTERFACE) - before) / self._settings.steps

    def plan(self, name: str) -> tuple[str, str | None]:
        """What bucketddp has planned, in words, and the profile that it has planned from, as JSON, if it has one."""
        reducer = self.training(name).attached.reducer
        assert reducer is not None
        return reducer.describe(), None if reducer.profile is None else reducer.profile.to_json()

    def _now_on_all_ranks(self) -> float:
        """The time at which all ranks are ready to begin."""
        synchronize(self._device)
        dist.barrier()
        synchronize(self._device)
        return time.perf_counter()


def bytes_sent_on(interface: str) -> int:
    """What has left through a network interface of this process's host, as the kernel counts it."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    [counters] = [line.split(":")[1].split() for line in lines if line.strip().startswith(f"{interface}:")]
    return int(counters[8])
