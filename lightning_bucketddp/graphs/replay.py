"""A CUDA graph, its outcome, and the host's part of a backward that is captured or replayed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_bucketddp.reducer.bucket import BufferedBucket, UseCounts
from lightning_bucketddp.reducer.bucket_set import BucketSet
from lightning_bucketddp.reducer.launch_queue import CapturedBackward
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.sharding.gradient import ShardedGradient, own_shard

_LAUNCHED_WITHIN_S = 1.0

_T = TypeVar("_T")


class CUDAGraph:
    """Work that was captured on the current stream."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self.pool = pool
        # Held while the graph is used: an abort, in another thread, resets it.
        self._use = threading.Lock()

    def capture(self, body: Callable[[], _T]) -> _T:
        """Capture `body`, and return what it returns: each replay writes into those tensors."""
        stream = torch.cuda.current_stream()
        # cuBLAS makes a workspace in the pool of this graph: Lightning frees all others when a Trainer ends.
        torch._C._cuda_clearCublasWorkspaces()
        # Collecting the graph of a failed fit during the capture would end the capture.
        gc.collect()
        try:
            # `thread_local`: meanwhile NCCL's watchdog queries its events, and loaders pin memory.
            with torch.cuda.graph(self._graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
                return body()
        except BaseException:
            # torch leaves the generator in its capturing state.
            generator = torch.cuda.default_generators[stream.device_index]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()

    def replay(self) -> None:
        with self._use:
            self._graph.replay()

    def release(self) -> None:
        """Reset the graph while the training thread may be waiting for it: NCCL is being aborted."""
        # Not during a launch. If that takes long, the end of the process frees it.
        if self._use.acquire(timeout=_LAUNCHED_WITHIN_S):
            self._graph.reset()
            self._use.release()


def new_graph(device: torch.device) -> Callable[[], CUDAGraph] | None:
    """Return a factory of graphs that share one pool; None: this device has none."""
    if device.type != "cuda":
        return None
    graphs: weakref.WeakSet[CUDAGraph] = weakref.WeakSet()

    def make() -> CUDAGraph:
        # A pool ends with its last graph, also if somebody has a tensor in it.
        pool = next((graph.pool for graph in graphs), None) or torch.cuda.graph_pool_handle()
        graphs.add(graph := CUDAGraph(pool))
        return graph

    return make


def references_to(params: Sequence[Tensor]) -> list[weakref.ref[Tensor] | None]:
    """Return weak references to the gradients of `params`: others would count as uses of their memory."""
    return [None if param.grad is None else weakref.ref(param.grad) for param in params]


class GradientMemory:
    """Where a graph has the gradients of `params`: in buckets, or in memory of its own.

    Has no references to views of buckets, because those are counted there.
    """

    def __init__(self, params: Sequence[Tensor], bucket_set: BucketSet | None) -> None:
        buckets = [] if bucket_set is None else bucket_set.buckets
        self._wires = [(bucket, bucket.wire) for bucket in buckets if isinstance(bucket, BufferedBucket)]
        views = {id(view) for bucket, _ in self._wires for view in bucket.views}
        for bucket, _ in self._wires:
            bucket.graphs.add(self)
        self._params = params
        self._gradients = references_to(params)
        self._own = [(param, param.grad) for param in params if param.grad is not None and id(param.grad) not in views]
        # Those that are divided among ranks refuse to be read after the next backward.
        counted = [(param, gradient) for param, gradient in self._own if not isinstance(gradient, ShardedGradient)]
        self._counts = UseCounts([param for param, _ in counted], [gradient for _, gradient in counted])
        self._uses = self._counts.largest()  # when nobody else has them

    def tensors(self) -> list[Tensor | None]:
        """Return the gradients, by parameter."""
        return [None if gradient is None else gradient() for gradient in self._gradients]

    def attach(self) -> None:
        """Set `.grad` of all parameters."""
        for param, gradient in zip(self._params, self.tensors(), strict=True):
            if param.grad is not gradient:
                param.grad = gradient

    def is_taken(self) -> bool:
        """Return whether a program keeps a gradient that is here, so that no replay may overwrite it."""
        if any(bucket.wire is not wire or bucket.is_used() for bucket, wire in self._wires):
            return True
        before, now = self._uses, self._counts.largest()
        self._uses = min(before[0], now[0]), min(before[1], now[1])  # gloo drops tensors late
        return now[0] > before[0] or now[1] > before[1]


@contextmanager
def captured_in(reducer: Reducer, loss_digest: Tensor | None) -> Iterator[CapturedBackward]:
    """Capture a step with one `captured_backward` inside; afterwards counts and digests are what they were.

    All ranks do this in the same step; one that captures nothing also runs its backward inside. The yielded object is
    complete at the end of the block. `loss_digest` holds earlier losses that are not exchanged yet.
    """
    stats, digest = replace(reducer.stats), reducer.finiteness.loss_digest
    reducer.finiteness.loss_digest = loss_digest
    captured = CapturedBackward()
    try:
        yield captured
    finally:
        captured.loss_digest, reducer.finiteness.loss_digest = reducer.finiteness.loss_digest, digest
        for field in fields(stats):
            setattr(reducer.stats, field.name, getattr(stats, field.name))


def is_replayable(reducer: Reducer, captured: CapturedBackward, trainable: tuple[bool, ...]) -> bool:
    """Return whether the settled plan and the trainable parameters are those of the capture."""
    if reducer.is_alone or trainable != captured.trainable:
        return trainable == captured.trainable
    return reducer.plans.bucket_set(trainable) is captured.bucket_set


def replay_backward(reducer: Reducer, captured: CapturedBackward, run: Callable[[], None]) -> None:
    """Call `run`, which replays a captured backward, and do the host's part of a backward around it."""
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
        reducer.finiteness.catch_up(reducer.stats)  # ranks check their shards together, before the next reduction
    weighting, factor, some_miss = reducer.weighting, None, False
    if weighting is not None:
        some_miss = captured.syncs and weighting.some_miss
        if weighting.begin(reducer.params, syncs=captured.syncs, trainable=captured.trainable):
            factor = reducer.factor_of_mean(captured.trainable)
    try:
        run()
        # This waits for the previous replay, while the device works on this one.
        reducer.finiteness.catch_up(reducer.stats, has_gradients=False)
    except BaseException as error:
        reducer.fail(error)
        raise
    reducer.finiteness.loss_digest = captured.loss_digest
    reducer.accumulated = () if captured.syncs else captured.trainable
    if not captured.syncs:
        for bucket in captured.bucket_set.buckets if reducer.maker is not None and captured.bucket_set else ():
            bucket.collect()  # in place: gradients of this rank alone are not divided
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
    """Have the buckets own the averaged gradients that a replay has left in `.grad`, multiplied by `factor`."""
    if reducer.bucket_set is not None and reducer.is_synchronised and (factor != 1 or reducer.maker is not None):
        reducer.bucket_set.take_gradients(factor)


# Kernels that add in no fixed order round differently in each run.
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
        """Name the first value that differs by more than rounding, or return ""; `factor` scales our gradients."""
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
