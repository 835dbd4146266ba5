"""Watching a step: what the plan tuner, the step recorder and torch's profiler are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.autograd.profiler import record_function

from lightning_bucketddp.comm.collectives import Pending
from lightning_bucketddp.reducer.bucket import PendingReduction

NOTHING = nullcontext()


class BackwardObserver:
    """Is told what a synchronised backward does, in this order, and of weights after it; this one does nothing."""

    def backward_began(self) -> None:
        """Note that a backward has begun."""

    def bucket_ready(self, index: int) -> None:
        """Note that all gradients of a bucket are there."""

    def bucket_launched(self, index: int) -> None:
        """Note that a bucket leaves, complete or not."""

    def reduction_started(self, index: int, pending: PendingReduction) -> None:
        """Note that the reduction of a bucket is under way."""

    def backward_ended(self) -> None:
        """Note that all gradients of this rank are there: from now on the step waits for reductions."""

    def reduction_ended(self, index: int) -> None:
        """Note that the step has waited for the reduction of a bucket."""

    def gradients_final(self) -> None:
        """Note that the gradients of all ranks are there."""

    def gather_started(self, bucket: object, transfer: Pending, num_bytes: int) -> None:
        """Note that the ranks exchange the weights of a bucket, each of which has stepped its share."""

    def gather_awaited(self, bucket: object) -> None:
        """Note that the step waits for those weights."""

    def gather_ended(self, bucket: object) -> None:
        """Note that they are there."""


class _Several(BackwardObserver):
    """Tells several observers all that it is told."""

    def __init__(self, observers: Sequence[BackwardObserver]) -> None:
        for name in (name for name in vars(BackwardObserver) if not name.startswith("__")):
            setattr(self, name, partial(_tell_all, [getattr(observer, name) for observer in observers]))


def _tell_all(methods: Sequence[Callable[..., None]], *args: Any) -> None:
    for method in methods:
        method(*args)


NO_OBSERVER = BackwardObserver()


def all_of(*observers: BackwardObserver | None) -> BackwardObserver:
    """Return one observer that tells all of `observers`."""
    present = [observer for observer in observers if observer is not None]
    if len(present) > 1:
        return _Several(present)
    return present[0] if present else NO_OBSERVER


def profiler_span(name: str) -> AbstractContextManager[Any]:
    """Show what happens inside as `name` in torch's profiler. Costs nothing while none runs."""
    return record_function(name) if _profiler_enabled() else NOTHING
