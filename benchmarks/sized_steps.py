"""Steps of models that are as large as wanted and compute next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ranks import synchronize
from benchmarks.variants import Attached, Variant, attach


@dataclass(frozen=True)
class Size:
    """Of a model: so many parameters, each of so many fp32 elements."""

    num_parameters: int
    num_elements: int


@dataclass(frozen=True)
class SizedSettings:
    """What takes turns.

    Attributes:
        sizes: of the models, each under the number that it stands for in the results.
        variants: which train each of them, under the same number.
        steps: measured in a turn.
    """

    sizes: Mapping[int, Size]
    variants: Mapping[int, tuple[Variant, ...]]
    steps: int


class SizedSteps:
    """Models that take turns, one of each size for each variant."""

    def __init__(self, settings: SizedSettings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._variants = {(at, v.name): v for at, variants in settings.variants.items() for v in variants}
        self._models: dict[tuple[int, str], Attached] = {}
        # What one rank alone does, it does in this thread; what other programs do does not count then.
        is_alone_on_cpu = dist.get_world_size() == 1 and device.type == "cpu"
        self._clock: Callable[[], float] = time.thread_time if is_alone_on_cpu else time.perf_counter

    def turn(self, at: int, name: str) -> float:
        """Seconds for `zero_grad` + backward."""
        model = self._model(at, name)
        self._step(model)  # what others have driven out of the caches comes back
        return sum(self._step(model) for _ in range(self._settings.steps)) / self._settings.steps

    def num_buckets(self, at: int, name: str) -> int:
        """Into how many buckets a variant has put the gradients."""
        return len(self._model(at, name).bucket_bytes())

    def _model(self, at: int, name: str) -> Attached:
        """In its steady state."""
        key = (at, name)
        if key not in self._models:
            model = _Parameters(self._settings.sizes[at]).to(self._device)
            self._models[key] = attach(self._variants[key], model, self._device)
            for _ in range(self._variants[key].steps_to_settle):
                self._step(self._models[key])
        return self._models[key]

    def _step(self, attached: Attached) -> float:
        loss = attached.model()
        synchronize(self._device)
        dist.barrier()
        start = self._clock()
        attached.model.zero_grad()
        with attached.backward():
            loss.backward()
        synchronize(self._device)
        return self._clock() - start


class _Parameters(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.parameters_ = nn.ParameterList(torch.zeros(size.num_elements) for _ in range(size.num_parameters))

    def forward(self) -> Tensor:
        return torch.stack([parameter.sum() for parameter in self.parameters_]).sum()
