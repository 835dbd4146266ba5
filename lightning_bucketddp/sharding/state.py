"""The state of an optimizer that is divided among the ranks, as an ordinary checkpoint has it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from lightning_bucketddp.checkpoint.rank_state import gather_to_rank_zero
from lightning_bucketddp.sharding.bucket import Shard
from lightning_bucketddp.sharding.optimizer import ShardedOptimizer


def gather_optimizer_state(sharded: ShardedOptimizer) -> dict[str, Any]:
    """Return what `state_dict` would without sharding, on rank zero, and {} on the others. All ranks must call this.

    It is put together in host memory, tensor by tensor: no device has room for all of it.
    """
    optimizer, params = sharded.optimizer, sharded.params
    pieces = {
        place: dict(optimizer.state[shard.piece])
        for place, param in enumerate(params)
        if (shard := sharded.shards.get(param)) and shard.piece is not None and shard.piece in optimizer.state
    }
    by_rank = gather_to_rank_zero(pieces, sharded.gathering.collectives)
    if by_rank is None:
        return {}
    state: dict[int, Any] = dict(sharded.loaded)
    for place, param in enumerate(params):
        shard = sharded.shards.get(param)
        if shard is None and param in optimizer.state:
            state[place] = optimizer.state[param]
        elif shard is not None and (of_ranks := {r: own.pop(place) for r, own in enumerate(by_rank) if place in own}):
            state[place] = _put_together(of_ranks, shard)
    places = itertools.count()
    groups = [{**group, "params": [next(places) for _ in group["params"]]} for group in optimizer.param_groups]
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _put_together(of_ranks: dict[int, dict[str, Any]], shard: Shard) -> dict[str, Any]:
    """Return the state of one parameter, from the parts that ranks have of it."""
    first_rank, whole = next(iter(of_ranks.items()))
    start, stop = shard.ranges[first_rank]
    for key, value in whole.items():
        is_cut = isinstance(value, Tensor) and value.shape == (stop - start,) and stop - start < shard.param.numel()
        if is_cut:
            parts = torch.cat([own[key] for own in of_ranks.values()])
            whole[key] = parts.as_strided(shard.param.shape, shard.param.stride())
    return whole
