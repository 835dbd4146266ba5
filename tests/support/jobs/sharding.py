"""Training with and without `shard_optimizer`, without Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.reducer.shards import ShardOption, Shards
from lightning_bucketddp.replicas.replicas import Replicas
from tests.support.jobs.models import CASES
from tests.support.ranks import device

NUM_STEPS = 4

OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "adadelta": lambda params: torch.optim.Adadelta(params),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "fused_adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "for_loop_adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
}


@dataclass(frozen=True)
class Outcome:
    """What a training has left on this rank.

    Attributes:
        norms: what clipping has found, by step.
        state_numel: elements of optimizer state.
    """

    weights: dict[str, Tensor]
    norms: list[float] = field(default_factory=list)
    state_numel: int = 0


def train(
    *,
    case: str,
    optimizer: str,
    shard: ShardOption,
    clip: float | None = None,
    num_steps: int = NUM_STEPS,
    micro_batches: int = 1,
    bucket_cap_mb: float = 0.0005,
) -> Outcome:
    """Train a model of the parity suite on this rank's data."""
    collectives = Collectives(device())
    torch.manual_seed(0)
    model = CASES[case].build().to(device())
    shards = Shards(collectives, whole_parameters=shard == "parameters") if shard else None
    reducer = Reducer(Replicas(model, collectives), ReducerConfig(bucket_cap_mb=bucket_cap_mb), shards=shards)
    inner = OPTIMIZERS[optimizer](model.parameters())
    if shards is not None:
        shards.add(inner)
    norms = []
    for step in range(num_steps):
        CASES[case].on_step(model, step)
        inner.zero_grad()
        for micro_batch in range(micro_batches):
            loss = CASES[case].loss(model, collectives.rank, step * micro_batches + micro_batch)
            if micro_batch < micro_batches - 1:
                with reducer.no_sync(), reducer.backward():
                    loss.backward()
            else:
                with reducer.backward():
                    loss.backward()
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        inner.step()
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    reducer.close()
    values = [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
    return Outcome(weights, norms, sum(value.numel() for value in values if value.dim() > 0))


def compare(*, tolerance: float = 0.0, **setting: Any) -> tuple[Outcome, Outcome]:
    """Train without and with sharding, and assert that weights are equal; return both outcomes."""
    shard = setting.pop("shard", True)
    whole, sharded = (train(shard=option, **setting) for option in (False, shard))
    for name, expected in whole.weights.items():
        torch.testing.assert_close(sharded.weights[name], expected, rtol=tolerance, atol=tolerance)
        on_rank_zero = sharded.weights[name].clone()
        dist.broadcast(on_rank_zero, src=0)
        assert torch.equal(sharded.weights[name], on_rank_zero), name
    return whole, sharded
