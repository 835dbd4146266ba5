"""What belongs to one backward, and what is left of one that was captured."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_bucketddp.reducer.bucket_set import BucketSet
from lightning_bucketddp.reducer.launch_queue import LaunchQueue
from lightning_bucketddp.reducer.observer import BackwardObserver


@dataclass(slots=True)
class CapturedBackward:
    """What a replay has to know of the backward that was captured."""

    trainable: tuple[bool, ...] = ()  # by parameter
    syncs: bool = False  # gradients are exchanged in it
    bucket_set: BucketSet | None = None  # None: this rank is alone
    missing: list[int] = field(default_factory=list)  # parameters without a gradient
    loss_digest: Tensor | None = None  # of the losses that have not been exchanged when it ends


@dataclass(slots=True, kw_only=True)
class BackwardPass:
    """Everything that belongs to one backward and dies with it."""

    trainable: tuple[bool, ...]  # by parameter
    syncs: bool  # gradients are exchanged at its end, if not before
    observer: BackwardObserver
    is_tuned: bool  # it is one of those from which a better plan is computed
    bucket_set: BucketSet | None  # None: there is no plan yet
    queue: LaunchQueue | None  # None: nothing is launched before the end
    factor: float | None  # what the mean is multiplied by; None: that is known at the end
    some_miss: bool  # all ranks compare what they miss when it ends
    captured: CapturedBackward | None  # it is captured: nothing is exchanged but gradients
    # Parameters whose gradients arrived, as long as there is no plan, and the streams on which they did.
    arrived: list[int] = field(default_factory=list)
    streams: set[torch.cuda.Stream] = field(default_factory=set)
