"""A CUDA graph, what it computes, and the host's part of the backward in it: when it is captured, and in replays."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_bucketddp.reducer.launch_queue import CapturedBackward
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.sharding.gradient import own_shard

_LAUNCHED_WITHIN_S = 1.0

_T = TypeVar("_T")


class CUDAGraph:
    """Work that was captured on the current stream."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        # Whoever holds it may use the graph, and nobody else: an abort lets go of it.
        self._use = threading.Lock()

    def capture(self, body: Callable[[], _T]) -> _T:
        """Capture what `body` does, and return what it returns: each replay writes into the tensors in that."""
        stream = torch.cuda.current_stream()
        # Others free cuBLAS' workspaces at any time, as Lightning does when a Trainer ends: one in the pool is ours.
        torch._C._cuda_clearCublasWorkspaces()
        # A graph that is garbage, of a fit that has failed, would otherwise be collected in here, and end the capture.
        gc.collect()
        try:
            # `thread_local`: NCCL's watchdog asks for its events meanwhile, and loaders pin memory.
            with torch.cuda.graph(self._graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                return body()
        except BaseException:
            # torch leaves its random numbers as if they were still captured.
            generator = torch.cuda.default_generators[stream.device_index]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()

    def replay(self) -> None:
        with self._use:
            self._graph.replay()

    def release(self) -> None:
        """Let go of it while the thread that trains may be waiting for it: NCCL is being aborted."""
        # Not while it is launched. If that takes long, it is the end of the process that lets go of it.
        if self._use.acquire(timeout=_LAUNCHED_WITHIN_S):
            self._graph.reset()
            self._use.release()


def new_graph(device: torch.device) -> Callable[[], CUDAGraph] | None:
    """Return what makes graphs on this device, all in one pool; None: nothing does."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()
    return lambda: CUDAGraph(pool)


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


def is_replayable(reducer: Reducer, captured: CapturedBackward, trainable: tuple[bool, ...]) -> bool:
    """Return whether the plan, which is settled, and what is trainable are what they were then."""
    if reducer.is_alone or trainable != captured.trainable:
        return trainable == captured.trainable
    return reducer.plans.bucket_set(trainable) is captured.bucket_set


def replay_backward(reducer: Reducer, captured: CapturedBackward, run: Callable[[], None]) -> None:
    """Do around `run`, which replays a captured backward, what the host does around one."""
    reducer.refuse_after_failure()
    reducer.stats.num_replayed += 1
    reducer.finiteness.begin()
    if reducer.is_alone:
        run()
        reducer.finiteness.catch_up(reducer.stats)
        reducer.finish_alone()
        return
    if reducer.maker is not None:
        reducer.maker.begin_backward()
        reducer.finiteness.catch_up(reducer.stats)  # ranks look at their shards together, before the next reduction
    weighting, factor, some_miss = reducer.weighting, None, False
    if weighting is not None:
        some_miss = captured.syncs and weighting.some_miss
        if weighting.begin(reducer.params, syncs=captured.syncs, trainable=captured.trainable):
            factor = reducer.factor_of_mean(captured.trainable)
    try:
        run()
        # It waits for the replay before; the device has this one to go on with.
        reducer.finiteness.catch_up(reducer.stats, has_gradients=False)
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


# Kernels that add in no fixed order differ from run to run by rounding.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_OTHER_ROUNDING = 2e-2


class Values(NamedTuple):
    """What a step logs and returns."""

    tensors: list[Tensor]
    numbers: list[Any]  # Python's

    @classmethod
    def of(cls, collection: Any) -> Values:
        tensors: list[Tensor] = []
        numbers: list[Any] = []
        apply_to_collection(collection, Tensor, tensors.append)
        apply_to_collection(collection, (int, float), numbers.append)
        return cls(tensors, numbers)

    def copied(self) -> Values:
        return Values([tensor.clone() for tensor in self.tensors], self.numbers)


@dataclass(frozen=True)
class Outcome:
    """What a step has computed."""

    values: Values
    gradients: list[Tensor | None]
    buffers: list[Tensor]

    @classmethod
    def of(cls, module: nn.Module, values: Values, gradients: Sequence[Tensor | None]) -> Outcome:
        """Copy it."""
        copies = [None if gradient is None else own_shard(gradient).clone() for gradient in gradients]
        return cls(values.copied(), copies, [buffer.clone() for buffer in module.buffers()])

    def find_difference(self, other: Outcome, module: nn.Module, *, factor: float) -> str:
        """Return what is another there, in words; empty: nothing is, but for rounding and `factor`, of gradients."""
        tensors, of_other = self.values.tensors, other.values.tensors
        if len(tensors) != len(of_other) or self.values.numbers != other.values.numbers:
            return "a number that is logged or returned"
        names = ["the loss", *("an output or a logged value" for _ in tensors[1:])]
        names += [f"the gradient of `{name}`" for name, _ in module.named_parameters()]
        names += [f"`{name}`" for name, _ in module.named_buffers()]
        gradients = self.gradients
        if factor != 1:
            gradients = [None if gradient is None else own_shard(gradient) * factor for gradient in gradients]
        ours = [*tensors, *gradients, *self.buffers]
        theirs = [*of_other, *other.gradients, *other.buffers]
        for name, one, another in zip(names, ours, theirs, strict=True):
            if not _are_alike(one, another):
                return name
        return ""


def _are_alike(one: Tensor | None, another: Tensor | None) -> bool:
    if one is None or another is None:
        return one is another
    one, another = own_shard(one), own_shard(another)
    if one.shape != another.shape or one.dtype != another.dtype:
        return False
    if torch.equal(one, another) or not one.numel():
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    one, another = one.nan_to_num(), another.nan_to_num()
    tolerance = _ROUNDING.get(one.dtype, _OTHER_ROUNDING)
    return bool((one - another).abs().max() <= tolerance * another.abs().max())
