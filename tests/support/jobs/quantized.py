"""Gradients that travel as int8."""

from __future__ import annotations

import copy
import math
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.trial import Trials
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.sharding.shards import ShardOption, Shards
from tests.support.jobs.models import CASES, WIDTH, batch
from tests.support.jobs.parity import (
    assert_equal_on_all_ranks,
    average_by_hand,
    average_quantized_by_hand,
    build_reducer,
)
from tests.support.ranks import device


def train_sharded(case: str, shard: ShardOption) -> int:
    """Train with divided state, whose gradients are rounded once only; return how many buckets there are."""
    collectives = Collectives(device())
    torch.manual_seed(0)
    model = CASES[case].build().to(device())
    reference = copy.deepcopy(model)
    shards = Shards(collectives, whole_parameters=shard == "parameters")
    config = ReducerConfig(bucket_cap_mb=0.0005, reduce_dtype="int8")
    reducer = Reducer(Replicas(model, collectives), config, maker=shards)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shards.add(optimizer)
    for step in range(3):
        CASES[case].on_step(model, step)
        CASES[case].on_step(reference, step)
        optimizer.zero_grad()
        with reducer.backward():
            CASES[case].loss(model, collectives.rank, step).backward()
        optimizer.step()
        reference.zero_grad()
        CASES[case].loss(reference, collectives.rank, step).backward()
        average_quantized_by_hand(reference, is_sharded=True)
        with torch.no_grad():
            for param in reference.parameters():
                if param.grad is not None:
                    param.add_(param.grad, alpha=-0.1)
    assert reducer.bucket_set is not None
    num_buckets = len(reducer.bucket_set.buckets)
    reducer.close()
    for (name, param), other in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(param, other[1], rtol=1e-6, atol=1e-7, msg=name)
    assert_equal_on_all_ranks(model)
    return num_buckets


def bytes_written(reduce_dtype: str | None, shard: ShardOption) -> int:
    """How many bytes this process gives to its sockets in three backwards of a model with a million parameters."""
    torch.manual_seed(0)
    collectives = Collectives(device())
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to(device())
    shards = Shards(collectives, whole_parameters=False) if shard else None
    reducer = Reducer(
        Replicas(model, collectives), ReducerConfig(bucket_cap_mb=1.0, reduce_dtype=reduce_dtype), maker=shards
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if shards is not None:
        shards.add(optimizer)
    written = []
    for step in range(4):
        model.zero_grad()
        loss = model(torch.randn(8, 512, generator=torch.Generator().manual_seed(step)).to(device())).square().mean()
        before = _written()
        with reducer.backward():
            loss.backward()
        dist.barrier()  # so that all that was given to gloo's threads has been written
        written.append(_written() - before)
    reducer.close()
    return sum(written[1:])  # the first one plans


def _written() -> int:
    [line] = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar:")]
    return int(line.split()[1])


def nan_of_rank_one() -> dict[str, bool]:
    """Whether each gradient is finite, when rank 1 has one NaN in the bias of the first of two layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 24), nn.Linear(24, 24)).to(device())
    reducer = build_reducer(model, reduce_dtype="int8", on_nonfinite=None)
    for step in range(2):
        model.zero_grad()
        if step == 1 and dist.get_rank() == 1:
            bias: nn.Parameter = model[0].bias  # type: ignore[assignment]
            bias.register_hook(lambda gradient: torch.where(torch.arange(24, device=device()) == 5, math.nan, gradient))
        with reducer.backward():
            model(batch(dist.get_rank(), step)).square().mean().backward()
    reducer.close()
    return {
        name: bool(param.grad.isfinite().all()) for name, param in model.named_parameters() if param.grad is not None
    }


def try_together() -> list[str]:
    """What three backwards in a trial raise: the ranks ask each other before collectives, but not in a thread."""
    model = CASES["mlp"].build().to(device())
    collectives = Collectives(device())
    trials = Trials(collectives, is_out_of_memory=lambda _: False)
    replicas = Replicas(model, collectives)
    replicas.broadcast()
    reducer = Reducer(replicas, ReducerConfig(reduce_dtype="int8", bucket_cap_mb=0.0005))
    raised = []
    for step in range(4):
        model.zero_grad()
        try:
            with trials.attempt():
                with reducer.backward():
                    CASES["mlp"].loss(model, dist.get_rank(), step).backward()
                if step == 2 and dist.get_rank() == 1:
                    raise KeyError("no more")
                dist.barrier()
        except Exception as error:
            raised.append(type(error).__name__)
    reducer.close()
    collectives.close_host_groups()
    return raised


def threads_left() -> list[str]:
    """The names of threads that a reducer has left."""
    before = set(threading.enumerate())
    model = CASES["mlp"].build().to(device())
    reducer = build_reducer(model, reduce_dtype="int8")
    for step in range(2):
        with reducer.backward():
            CASES["mlp"].loss(model, dist.get_rank(), step).backward()
    new = [thread.name for thread in threading.enumerate() if thread not in before]
    assert new == ["bucketddp-quantized"] or device().type != "cpu", new
    reducer.close()
    return [thread.name for thread in threading.enumerate() if thread not in before]


def buckets_of_all_sizes() -> None:
    """Gradients of from one to thousands of numbers come out as the mean, to within what 8 bits can say."""
    world_size = dist.get_world_size()
    sizes = [1, 2, 255, 256, 257, 511, 513, 256 * world_size, 256 * world_size + 1, 5000]
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes]).to(device())
    for cap in (1e-6, 0.004, 25.0):
        reducer = build_reducer(model, reduce_dtype="int8", bucket_cap_mb=cap)
        for step in range(2):
            model.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            factors = [torch.randn(size, generator=generator).to(device()) for size in sizes]
            with reducer.backward():
                torch.stack([(p * f).sum() for p, f in zip(model, factors, strict=True)]).sum().backward()
            for param, factor in zip(model, factors, strict=True):
                expected = nn.Parameter(torch.zeros_like(param))
                expected.grad = factor.clone()
                average_by_hand(nn.ParameterList([expected]))
                largest = factor.abs().max()
                dist.all_reduce(largest, op=dist.ReduceOp.MAX)
                assert param.grad is not None
                assert expected.grad is not None
                assert (param.grad - expected.grad).abs().max() <= 2.01 * largest / 254, (param.shape, cap)
        reducer.close()
