"""What belongs to one backward."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lightning_bucketddp.reducer.bucket_set import BucketSet
from lightning_bucketddp.reducer.launch_queue import LaunchQueue
from lightning_bucketddp.reducer.observer import BackwardObserver


@dataclass(slots=True, kw_only=True)
class BackwardPass:
    """Everything that belongs to one backward and dies with it.

    Attributes:
        trainable: by parameter.
        syncs: gradients are exchanged at its end, if not before.
        is_tuned: it is one of those from which a better plan is computed.
        bucket_set: None: there is no plan yet.
        queue: None: nothing is launched before the end.
        factor: what the mean is multiplied by; None: that is known at the end.
        some_miss: all ranks compare what they miss when it ends.
        arrived: parameters whose gradients arrived, as long as there is no plan.
        streams: on which they did.
    """

    trainable: tuple[bool, ...]
    syncs: bool
    observer: BackwardObserver
    is_tuned: bool
    bucket_set: BucketSet | None
    queue: LaunchQueue | None
    factor: float | None
    some_miss: bool
    arrived: list[int] = field(default_factory=list)
    streams: set[torch.cuda.Stream] = field(default_factory=set)
