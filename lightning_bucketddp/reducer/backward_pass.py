"""What belongs to one backward.

Note: scope of a backward
    `Reducer.backward()` marks one from outside. A backward that nobody marked (a plain `loss.backward()`) begins with
    its first hook and ends with a callback of the autograd engine. An exception inside it drops that callback, and
    with it the `Alive` token: that is how the next backward knows that the last one died, and how a hook inside a
    nested backward (reentrant checkpointing) knows that the outer one still runs.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from lightning_bucketddp.reducer.bucket_set import BucketSet
from lightning_bucketddp.reducer.launch_queue import LaunchQueue

if TYPE_CHECKING:
    from lightning_bucketddp.reducer.plan_tuner import PlanTuner
    from lightning_bucketddp.reducer.step_recorder import StepRecorder


class Alive:
    """Held by the autograd engine as long as a backward runs, and by nobody else."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class BackwardPass:
    """Everything that belongs to one backward and dies with it."""

    trainable: tuple[bool, ...]
    syncs: bool
    reductions: LaunchQueue | None
    bucket_set: BucketSet | None
    factor: float | None = None
    tuner: PlanTuner | None = None
    recorder: StepRecorder | None = None
    alive: weakref.ref[Alive] | None = None
    arrived: list[int] = field(default_factory=list)
    streams: set[torch.cuda.Stream] = field(default_factory=set)

    @property
    def died(self) -> bool:
        return self.alive is not None and self.alive() is None
