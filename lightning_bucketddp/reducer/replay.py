"""A backward that is captured as a CUDA graph: the host's part of it, when it is captured and in each replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

import torch
from torch import Tensor

from lightning_bucketddp.reducer.launch_queue import CapturedBackward
from lightning_bucketddp.reducer.reducer import Reducer


@contextmanager
def captured_in(reducer: Reducer, loss_digest: Tensor | None) -> Iterator[CapturedBackward]:
    """Run one backward inside that exchanges gradients and nothing else: what is left is done by `replay_backward`.

    The ranks may do this in the same step only, and one that captures nothing runs its backward inside, too. What
    the context gives is complete at its end. `loss_digest` is that of the losses before, not exchanged yet.
    """
    stats, digest = replace(reducer.stats), reducer.finiteness.loss_digest
    reducer.finiteness.loss_digest = loss_digest
    reducer.captured = captured = CapturedBackward()
    try:
        yield captured
    finally:
        captured.loss_digest, reducer.finiteness.loss_digest = reducer.finiteness.loss_digest, digest
        reducer.captured = None
        for field in fields(stats):
            setattr(reducer.stats, field.name, getattr(stats, field.name))


def is_replayable(reducer: Reducer, captured: CapturedBackward) -> bool:
    """Return whether the plan, which is settled, and what is trainable are what they were then."""
    trainable = reducer.trainable()
    if reducer.is_alone or trainable != captured.trainable:
        return trainable == captured.trainable
    return reducer.plans.bucket_set(trainable) is captured.bucket_set


def replay_backward(reducer: Reducer, captured: CapturedBackward, run: Callable[[], None]) -> None:
    """Do around `run`, which replays a captured backward, what the host does around one."""
    reducer.refuse_after_failure()
    reducer.stats.num_replayed += 1
    if reducer.is_alone:
        reducer.finiteness.begin(reducer.stats)
        run()
        reducer.finish_alone()
        return
    if reducer.maker is not None:
        reducer.maker.begin_backward()
    weighting, factor, some_miss = reducer.weighting, None, False
    if weighting is not None:
        some_miss = captured.syncs and weighting.some_miss
        if weighting.begin(reducer.params, syncs=captured.syncs, trainable=captured.trainable):
            factor = reducer.factor_of_mean(captured.trainable)
    try:
        # Last of all: it waits for the replay before, and until `run` the device has nothing to do.
        reducer.finiteness.begin(reducer.stats)
        run()
    except BaseException as error:
        reducer.fail(error)
        raise
    reducer.finiteness.loss_digest = captured.loss_digest
    reducer.accumulated = () if captured.syncs else captured.trainable
    if not captured.syncs:
        return
    factor = reducer.factor_of_mean(captured.trainable) if factor is None else factor
    assert captured.bucket_set is not None
    reducer.bucket_set = captured.bucket_set
    reducer.stats.num_reductions += len(captured.bucket_set.buckets)
    reducer.stats.bytes_sent += captured.bytes_sent
    with torch.no_grad():
        if weighting is not None:
            weighting.compare_missing([], some_miss=some_miss)
        take_gradients(reducer, factor)
        if weighting is not None:
            weighting.end()
        reducer.read_digests(captured.bucket_set)


def take_gradients(reducer: Reducer, factor: float = 1.0) -> None:
    """Take over averaged gradients that parameters were given outside of a backward, multiplied by `factor`."""
    if reducer.bucket_set is not None and reducer.is_synchronised and (factor != 1 or reducer.maker is not None):
        reducer.bucket_set.take_gradients(factor)
