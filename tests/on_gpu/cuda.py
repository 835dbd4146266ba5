"""What only a GPU can show: streams, host synchronisation, device memory."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import StepExchange, Weighting
from lightning_bucketddp.config import ReducerConfig, ReplicaChecks
from lightning_bucketddp.graphs.replay import new_graph
from lightning_bucketddp.recording.writer import StepRecorder, step_of
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.sharding.shards import ShardOption, Shards
from tests.reducer.test_user_collectives import SumOverRanks
from tests.replicas.test_consistency import Training
from tests.support.jobs.models import batch
from tests.support.jobs.parity import (
    assert_equal_on_all_ranks,
    average_by_hand,
    average_quantized_by_hand,
    build_reducer,
)
from tests.support.jobs.recording import CONFIGS, assert_in_order, assert_weights_are_recorded
from tests.support.ranks import device

WIDE = 1024


def _wide_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(WIDE, WIDE) for _ in range(8)]).to(device())


class Communicating(nn.Module):
    """Adds up gradients over the ranks in the middle of its backward."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers: Any = layers

    def forward(self, x: Tensor) -> Tensor:
        hidden = SumOverRanks.apply(self.layers[:4](x))
        return self.layers[4:](hidden)


class OnSideStream(nn.Module):
    """Every second layer runs on another stream, so its gradients are computed there too."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers
        self._side = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        for index, layer in enumerate(self.layers):
            if index % 2:
                self._side.wait_stream(main)
                with torch.cuda.stream(self._side):
                    x = layer(x)
                main.wait_stream(self._side)
            else:
                x = layer(x)
        return x


def gradients_from_several_streams_are_waited_for() -> None:
    layers = _wide_model()
    reference = copy.deepcopy(layers)
    model = OnSideStream(layers)  # type: ignore[arg-type]
    reducer = build_reducer(model, bucket_cap_mb=4.5)
    for step in range(10):
        x = batch(dist.get_rank(), step, 512, WIDE)
        for module in (model, reference):
            module.zero_grad()
            with reducer.backward() if module is model else nullcontext():
                module(x).square().mean().backward()
        average_by_hand(reference)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    assert reducer.bucket_set is not None
    assert len(reducer.bucket_set.streams) == 2


def _sharded(
    model: nn.Module, optimizer: torch.optim.Optimizer, collectives: Collectives, shard: ShardOption
) -> Shards:
    shards = Shards(collectives, whole_parameters=shard == "parameters")
    shards.add(optimizer)
    return shards


def a_step_never_makes_the_host_wait(shard: ShardOption = False, reduce_dtype: str | None = None) -> None:
    """torch raises where an operation would synchronise the host with the device."""
    model = _wide_model()
    collectives = Collectives(device())
    weighting = Weighting(StepExchange(collectives), by_weight=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    reducer = Reducer(
        Replicas(model, collectives),
        ReducerConfig(bucket_cap_mb=4.5, reduce_dtype=reduce_dtype),
        weighting=weighting,
        maker=_sharded(model, optimizer, collectives, shard) if shard else None,
    )
    x = batch(dist.get_rank(), 0, 64, WIDE)
    for step in range(4):
        if step == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.zero_grad()
            weighting.add(1.0)
            with reducer.no_sync(), reducer.backward():
                model(x).square().mean().backward()
            weighting.add(1.0 + dist.get_rank())
            loss = model(x).square().mean()
            reducer.finiteness.check_loss(loss)
            with reducer.backward():
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        finally:
            if step == 3:
                torch.cuda.set_sync_debug_mode("default")
    assert_equal_on_all_ranks(model)


def sharded_weights_reach_several_streams() -> None:
    """When a step returns, its weights are right on all streams that wait for its own."""
    layers = _wide_model()
    reference = copy.deepcopy(layers)
    model = OnSideStream(layers)  # type: ignore[arg-type]
    collectives = Collectives(device())
    optimizer, theirs = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, reference))
    shards = _sharded(model, optimizer, collectives, True)
    reducer = Reducer(Replicas(model, collectives), ReducerConfig(bucket_cap_mb=4.5), maker=shards)
    for step in range(10):
        x = batch(dist.get_rank(), step, 512, WIDE)
        for module in (model, reference):
            module.zero_grad()
            loss = module(x).square().mean()
            with reducer.backward() if module is model else nullcontext():
                loss.backward()
        average_by_hand(reference)
        optimizer.step()
        theirs.step()
    for ours, their in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, their)
    reducer.close()


def a_recorded_step_never_makes_the_host_wait(config: str, *, shard: bool = False) -> list[float]:
    """The same for steps that are recorded; the times, read afterwards, are in order. Returns the exposed ones."""
    model = _wide_model()
    shards = Shards(Collectives(device()), whole_parameters=False) if shard else None
    reducer = build_reducer(model, bucket_cap_mb=4.5, shards=shards, **CONFIGS[config])
    recorder = StepRecorder(device())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if shards is not None:
        shards.add(optimizer)
    x = batch(dist.get_rank(), 0, 64, WIDE)
    marked = []
    for step in range(8):
        if step == 3 and shards is not None:
            shards.observe(recorder)
        if step == 4:
            reducer.observer = recorder
            recorder.begin(reducer.stats)
            torch.cuda.set_sync_debug_mode("error")
        try:
            with recorder.during("forward"):
                loss = model(x).square().mean()
            with recorder.during("backward"), reducer.backward():
                loss.backward()
            with recorder.during("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            if step >= 4:
                assert reducer.bucket_set is not None
                version, buckets = reducer.bucket_set.version, reducer.bucket_set.buckets
                marked.append(recorder.complete(reducer.stats, step=step, plan=version, buckets=buckets))
                recorder.is_past(marked[0])
        finally:
            if step == 7:
                torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert all(recorder.is_past(one) for one in marked)
    before_s, steps = time.perf_counter(), [step_of(one, recorder.axis, memory_bytes=0) for one in marked]
    for recorded in steps:
        assert recorded is not None
        assert len(recorded.buckets) > 1
        if shard:
            assert_weights_are_recorded(recorded, num_buckets=len(recorded.buckets))
            # A reduce-scatter and an all-gather are an all-reduce; there are flags, too, and room between slices.
            assert 0.999 < recorded.bytes_on_wire / sum(param.nbytes for param in model.parameters()) < 1.01
        # Events have a resolution of half a microsecond, and clocks differ.
        assert_in_order(recorded, tolerance_s=1e-5)
        assert 0 < recorded.end_s - recorded.start_s < 5
        assert recorded.end_s < before_s + 0.01
    recorder.close()
    reducer.close()
    return [recorded.exposed_s for recorded in steps if recorded is not None]


def a_check_of_the_replicas_never_makes_the_host_wait() -> None:
    """The same for steps that start checksums, send them and read the answer."""
    training = Training(ReplicaChecks(1))
    inputs = [batch(dist.get_rank(), step) for step in range(8)]
    for x in inputs[:3]:
        training.step(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in inputs[3:]:
            training.step(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    training.reducer.close()
    assert_equal_on_all_ranks(training.model)


def peak_gradient_memory() -> tuple[float, float]:
    """Peak device memory of a step over the same step without communication, in units of the gradients' size.

    Once with one micro-batch and once with two.
    """
    model = _wide_model()
    size_of_gradients = sum(param.nbytes for param in model.parameters())
    x = batch(dist.get_rank(), 0, 8, WIDE)

    def peak_of_step(micro_batches: int, marked: Callable[[], AbstractContextManager[None]] = nullcontext) -> int:
        for param in model.parameters():
            param.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(micro_batches):
            loss = model(x).square().mean()
            with marked():
                loss.backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    alone = [peak_of_step(1), peak_of_step(2)]
    reducer = build_reducer(model, bucket_cap_mb=4.5)
    peak_of_step(1, reducer.backward)  # plans
    ours = [peak_of_step(1, reducer.backward), peak_of_step(2, reducer.backward)]
    reducer.close()
    # Without communication the gradients themselves are part of the peak.
    extra = [1 + (our - single) / size_of_gradients for our, single in zip(ours, alone, strict=True)]
    return extra[0], extra[1]


def divided_buckets_hold_no_memory_between_steps(shard: ShardOption) -> None:
    """What is left when gradients are None: weights, a share of the optimizer's state, and a buffer under 1 MiB."""
    before = torch.cuda.memory_allocated()
    model = _wide_model()
    weights = sum(param.nbytes for param in model.parameters())
    collectives = Collectives(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shards = _sharded(model, optimizer, collectives, shard)
    reducer = Reducer(Replicas(model, collectives), ReducerConfig(bucket_cap_mb=9), maker=shards)
    for step in range(4):
        optimizer.zero_grad()
        reducer.give_back_memory()
        held = torch.cuda.memory_allocated() - before - weights
        loss = model(batch(dist.get_rank(), step, 8, WIDE)).square().mean()
        with reducer.backward():
            loss.backward()
        del loss
        optimizer.step()
    assert held < weights / 2 + 3 * 2**20, f"{held / 2**20:.1f} MiB, weights {weights / 2**20:.1f} MiB"
    reducer.close()


def a_graph_that_is_garbage_leaves_captures_alone() -> None:
    """As those of a fit that has failed are: its traceback holds them."""
    number = torch.zeros((), device=device())
    make_graph = new_graph(device())
    assert make_graph is not None
    with torch.cuda.stream(torch.cuda.Stream()):
        garbage: list[Any] = [make_graph()]
        garbage[0].capture(lambda: number.add_(1))
        garbage.append(garbage)
        del garbage

        def body() -> None:
            gc.collect()
            number.add_(1)

        graph = make_graph()
        graph.capture(body)
        graph.replay()
    torch.cuda.synchronize()
    assert number.item() == 1


def a_captured_step_trains_like_others(
    shard: ShardOption = False, reduce_dtype: str | None = None, *, communicates: bool = False
) -> None:
    """`torch.cuda.graph` captures forward, backward, reductions and the optimizer's step."""
    model = Communicating(_wide_model()) if communicates else _wide_model()
    reference = copy.deepcopy(model)
    collectives = Collectives(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = Reducer(
        Replicas(model, collectives),
        ReducerConfig(bucket_cap_mb=4.5, reduce_dtype=reduce_dtype),
        maker=_sharded(model, optimizer, collectives, shard) if shard else None,
    )
    average = average_by_hand
    if reduce_dtype == "int8":
        average = partial(average_quantized_by_hand, is_sharded=bool(shard))
    their_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    x = batch(dist.get_rank(), 0, 64, WIDE)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        reducer.finiteness.check_loss(loss)
        with reducer.backward():
            loss.backward()
        optimizer.step()

    def their_step() -> None:
        their_optimizer.zero_grad()
        reference(x).square().mean().backward()
        average(reference)
        their_optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(4):
        their_step()
    for number in range(1, 6):
        x.copy_(batch(dist.get_rank(), number, 64, WIDE))
        graph.replay()
        their_step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    step()  # goes on without the graph
    their_step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert reducer.has_exchanged in (True, False)  # can be asked
    reducer.close()
