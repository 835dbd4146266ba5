"""Gradients that travel as int8: what arrives, what it costs, and what it must never hide.

Two ranks give each other all they have; more exchange parts, and round the mean once more.
"""

from __future__ import annotations

import copy
import math
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_bucketddp.callbacks.batch_size_finder import Trials
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.reducer.quantization import Blocks
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.sharding.shards import ShardOption, Shards
from tests.support.cases import for_each
from tests.support.jobs.models import CASES, WIDTH, batch
from tests.support.jobs.parity import (
    Training,
    assert_equal_on_all_ranks,
    average_quantized_by_hand,
    build_reducer,
    parity_with_quantized_mean,
)
from tests.support.jobs.sharding import Run
from tests.support.ranks import device, on_ranks, run_on_ranks


def train_sharded(case: str, shard: ShardOption) -> int:
    """Train with divided state, whose gradients are rounded once only; return how many buckets there are."""
    run = Run(case, "sgd", shard, reduce_dtype="int8")
    reference = copy.deepcopy(run.model)
    for step in range(3):
        CASES[case].on_step(run.model, step)
        CASES[case].on_step(reference, step)
        run.train([step])
        reference.zero_grad()
        CASES[case].loss(reference, dist.get_rank(), step).backward()
        average_quantized_by_hand(reference, is_sharded=True)
        with torch.no_grad():
            for param in reference.parameters():
                if param.grad is not None:
                    param.add_(param.grad, alpha=-0.1)
    assert run.reducer.bucket_set is not None
    num_buckets = len(run.reducer.bucket_set.buckets)
    run.reducer.close()
    for (name, param), other in zip(run.model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-7, msg=name)
    assert_equal_on_all_ranks(run.model)
    return num_buckets


def bytes_written(reduce_dtype: str | None, shard: ShardOption) -> int:
    """How many bytes this process gives to its sockets in three backwards of a model with a million parameters."""
    torch.manual_seed(0)
    collectives = Collectives(device())
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to(device())
    shards = Shards(collectives, whole_parameters=False) if shard else None
    config = ReducerConfig(bucket_cap_mb=1.0, reduce_dtype=reduce_dtype)
    reducer = Reducer(Replicas(model, collectives), config, maker=shards)
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


@for_each("case", ["mlp", "unused_in_turns", "channels_last", "complex", "many_dtypes", "sparse_embedding"])
def test_what_arrives_is_the_mean_of_what_was_rounded(case: str) -> None:
    run_on_ranks(parity_with_quantized_mean, case=case, training=Training(reduce_dtype="int8"))


@for_each(
    ("case", "world_size", "options"),
    [
        # More than two ranks round the mean once more.
        *((case, 4, {"bucket_cap_mb": 0.0005}) for case in ("mlp", "unused_in_turns", "many_dtypes")),
        ("unused_in_turns", 2, {"micro_batches": 3}),
        ("unused_in_turns", 2, {"all_alone": True}),
        ("channels_last", 2, {"bucket_cap_mb": 0.0005}),
    ],
)
def test_so_it_is_however_gradients_are_collected(case: str, world_size: int, options: dict[str, Any]) -> None:
    training = Training(reduce_dtype="int8", **options)
    run_on_ranks(parity_with_quantized_mean, world_size=world_size, case=case, training=training)


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_every_size_arrives(world_size: int) -> None:
    """Gradients of one to thousands of numbers become the mean, with the precision of 8 bits."""
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
                largest = factor.abs().max()
                dist.all_reduce(largest, op=dist.ReduceOp.MAX)
                dist.all_reduce(factor)
                assert param.grad is not None
                distance = (param.grad - factor / world_size).abs().max()
                assert distance <= 2.01 * largest / 254, (param.shape, cap)
        reducer.close()


@pytest.mark.parametrize(
    ("case", "shard"), [("channels_last", True), ("channels_last", "parameters"), ("unused_in_turns", "parameters")]
)
def test_with_divided_state_the_mean_is_rounded_once(case: str, shard: bool | str) -> None:
    assert min(run_on_ranks(train_sharded, case=case, shard=shard)) > 1


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_are_a_quarter(world_size: int) -> None:
    [fp32, *_], [int8, *_], [scattered, *_] = (
        run_on_ranks(bytes_written, world_size=world_size, reduce_dtype=dtype, shard=shard)
        for dtype, shard in ((None, False), ("int8", False), ("int8", True))
    )
    assert 0.25 < int8 / fp32 <= 0.27
    assert 0.125 < scattered / fp32 <= 0.14  # the scatter half alone


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_a_nan_stays_one_and_stays_where_it_is(world_size: int) -> None:
    """Rank 1 has one NaN in the bias of the first of two layers."""
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
    finite = [param.grad is not None and bool(param.grad.isfinite().all()) for param in model.parameters()]
    assert finite == [True, False, True, True]


@on_ranks(4)
def test_in_a_trial_the_ranks_fail_together() -> None:
    """The ranks ask each other before collectives, but not in a thread."""
    model = CASES["mlp"].build().to(device())
    collectives = Collectives(device())
    trials = Trials(collectives, is_out_of_memory=lambda _: False)
    replicas = Replicas(model, collectives)
    replicas.broadcast()
    reducer = Reducer(replicas, ReducerConfig(reduce_dtype="int8", bucket_cap_mb=0.0005))
    for step in range(4):
        model.zero_grad()
        fails, of_all = step == 2, KeyError if dist.get_rank() == 1 else RuntimeError
        with pytest.raises(of_all) if fails else nullcontext(), trials.attempt():
            with reducer.backward():
                CASES["mlp"].loss(model, dist.get_rank(), step).backward()
            if fails and dist.get_rank() == 1:
                raise KeyError("no more")
            dist.barrier()
    reducer.close()
    collectives.close_host_groups()


@on_ranks(4)
def test_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    model = CASES["mlp"].build().to(device())
    reducer = build_reducer(model, reduce_dtype="int8")
    for step in range(2):
        with reducer.backward():
            CASES["mlp"].loss(model, dist.get_rank(), step).backward()
    new = [thread.name for thread in threading.enumerate() if thread not in before]
    assert new == ["bucketddp-quantized"] or device().type != "cpu", new
    reducer.close()
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []


@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_blocks_keep_zeros_and_the_largest_number_and_are_spoiled_alone(dtype: torch.dtype) -> None:
    blocks = Blocks(1000, num_rows=2, row_numel=512, device=torch.device("cpu"))
    numbers = torch.zeros(1000, dtype=dtype)
    numbers[10] = torch.finfo(dtype).max if dtype != torch.float64 else torch.finfo(torch.float32).max
    numbers[300] = -1e-7  # less than fp16 can invert
    numbers[600] = float("nan")
    numbers[999] = -float("inf")
    decoded = torch.full_like(numbers, 7)
    blocks.encode(numbers)
    blocks.decode(decoded)
    torch.testing.assert_close(decoded[:512], numbers[:512], rtol=1e-2, atol=0)
    assert not decoded[512:768].isfinite().any()
    assert not decoded[768:].isfinite().any()
    assert blocks.bytes.nbytes == 2 * 2 * (256 + 4)
