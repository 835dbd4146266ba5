"""Gradients of ranks that count differently: with sparse and dense buckets, casts, hooks, and skipped backwards."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import StepExchange
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.reducer.weighting import Weighting
from lightning_bucketddp.replicas.replicas import Replicas
from tests.support.jobs.parity import assert_equal_on_all_ranks
from tests.support.ranks import device

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without_overlap": {"overlap": False},
    "bf16_wire": {"reduce_dtype": "bf16"},
    "int8_wire": {"reduce_dtype": "int8"},
    "hook": {"comm_hook": default_hooks.allreduce_hook},
}


class _Model(nn.Module):
    """A sparse bucket, a dense one of many, and a layer that only rank 0 uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(7, 4, sparse=True)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.only_on_rank_zero = nn.Linear(4, 4)

    def loss(self, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        words = torch.randint(0, 7, (5,), generator=generator).to(device())
        outputs = self.layers(self.embedding(words))
        return (self.only_on_rank_zero(outputs) if rank == 0 else outputs).square().mean()


def weighted_mean(config: str, num_micro_batches: int) -> None:
    """Three steps; rank r weighs r + 1, micro-batch m weighs m + 1, and rank 1 has nothing in the last step."""
    model, reference = _Model().to(device()), _Model().to(device())
    collectives = Collectives(device())
    weighting = Weighting(StepExchange(collectives), by_weight=True)
    reducer_config = ReducerConfig(bucket_cap_mb=60 / 2**20, **CONFIGS[config])
    reducer = Reducer(Replicas(model, collectives), reducer_config, weighting=weighting)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        model.zero_grad()
        reference.zero_grad()
        weights = {
            (r, m): (r + 1.0) * (m + 1.0) * (step < 2 or r != 1)
            for r in range(world_size)
            for m in range(num_micro_batches)
        }
        for m in range(num_micro_batches):
            weighting.add(weights[rank, m])
            with reducer.no_sync() if m < num_micro_batches - 1 else nullcontext(), reducer.backward():
                (model.loss(rank, 10 * step + m) * weights[rank, m]).backward()
        losses = [w * reference.loss(r, 10 * step + m) / sum(weights.values()) for (r, m), w in weights.items()]
        torch.stack(losses).sum().backward()
        tolerance = 2e-2 if config in ("bf16_wire", "int8_wire") else 1e-5
        for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert param.grad is not None, name
            assert other.grad is not None, name
            assert param.grad.is_sparse == other.grad.is_sparse, name
            torch.testing.assert_close(
                param.grad.to_dense(), other.grad.to_dense(), rtol=tolerance, atol=tolerance, msg=name
            )
        assert_equal_on_all_ranks(model)
