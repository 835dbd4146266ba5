"""A gradient that is divided among the ranks can be changed element by element; all else is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.sharding.gradient import ShardedGradientError
from lightning_bucketddp.sharding.shards import Shards
from tests.support.ranks import device, run_on_ranks


def _set_data(gradient: Tensor) -> None:
    gradient.data = torch.ones(gradient.shape)


_MIXING = torch.ones(6, 6)


def _zeroed(gradient: Tensor) -> None:
    param = nn.Parameter(torch.zeros(gradient.shape))
    param.grad = gradient
    torch.optim.SGD([param], lr=0.1).zero_grad(set_to_none=False)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda gradient: gradient.mul_(2),
    "clamp_": lambda gradient: gradient.clamp_(-0.1, 0.1),
    "rows": lambda gradient: gradient.__setitem__(slice(0, 2), 0.0),
    "noise": lambda gradient: gradient.add_(torch.ones_like(gradient) + gradient.new_zeros(1)),
    "data.add_": lambda gradient: gradient.data.add_(1),
    "nan_to_num_": lambda gradient: torch.nan_to_num_(gradient),
    "masked_fill_": lambda gradient: gradient.masked_fill_(torch.eye(6) > 0, 3.0),
    "addcmul_": lambda gradient: gradient.addcmul_(torch.eye(6), torch.ones(6), value=0.5),
    "lerp_": lambda gradient: gradient.lerp_(torch.ones(6, 6), 0.5),
    "copy_": lambda gradient: gradient.copy_(torch.arange(36.0).view(6, 6)),
    "foreach": lambda gradient: torch._foreach_mul_([gradient], torch.tensor(0.5)),
    "zeroed by an optimizer": lambda gradient: _zeroed(gradient),
    "addmm_": lambda gradient: gradient.addmm_(_MIXING, _MIXING),
    "addmm_ with itself": lambda gradient: gradient.addmm_(_MIXING, gradient),
    "baddbmm_": lambda gradient: gradient.unsqueeze(0).baddbmm_(_MIXING[None], _MIXING[None]),
    "permuted": lambda gradient: gradient.__setitem__(torch.tensor([1, 0]), gradient),
    "twice itself": lambda gradient: gradient.add_(gradient),
    "index_add_": lambda gradient: gradient.index_add_(0, torch.tensor([0, 1]), torch.ones(2, 6)),
    "sort": lambda gradient: torch.sort(gradient, out=(gradient, torch.empty(0, dtype=torch.long))),
    "cumsum_": lambda gradient: gradient.cumsum_(0),
    "renorm_": lambda gradient: gradient.renorm_(2, 0, 0.01),
    "t_": lambda gradient: gradient.t_(),
    "data": _set_data,
}


def change() -> dict[str, str]:
    """Return what becomes of each change: "the same" as without sharding, "another", or "refused"."""
    collectives = Collectives(device())
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    shards = Shards(collectives, whole_parameters=False)
    reducer = Reducer(Replicas(model, collectives), ReducerConfig(bucket_cap_mb=1), maker=shards)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shards.add(optimizer)
    outcomes = {}
    for name, function in CHANGES.items():
        optimizer.zero_grad()
        with reducer.backward():
            model(torch.full((2, 6), collectives.rank + 1.0)).square().mean().backward()
        expected = shards.full_gradient(cast(nn.Parameter, model.weight))
        assert expected is not None
        assert model.weight.grad is not None
        try:
            function(model.weight.grad)
        except ShardedGradientError:
            outcomes[name] = "refused"
            continue
        function(expected)
        outcomes[name] = "the same" if torch.equal(_stepped(model.weight, optimizer), expected) else "another"
    reducer.close()
    return outcomes


def _stepped(weight: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the gradient that all ranks together have stepped `weight` by."""
    with torch.no_grad():
        weight.zero_()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    return -weight.detach()


def test_a_change_is_what_it_is_without_sharding_or_refused() -> None:
    refused = {"cumsum_", "renorm_", "t_", "data", "addmm_", "addmm_ with itself", "baddbmm_", "permuted", "sort"}
    refused |= {"twice itself", "index_add_"}
    for outcomes in run_on_ranks(change):
        assert outcomes == {name: "refused" if name in refused else "the same" for name in CHANGES}
