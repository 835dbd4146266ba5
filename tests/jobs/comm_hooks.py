"""torch's communication hooks, given to our reducer and to torch DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.jobs.models import WIDTH, batch
from tests.jobs.parity import assert_equal_on_all_ranks, build_reducer
from tests.ranks import device

Hook = Callable[..., Any]


def _power_sgd() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )


# The hook and what makes its state. Not here are those that fail on gloo under torch DDP too (torch 2.13): both
# quantizations and batched PowerSGD.
HOOKS: dict[str, tuple[Hook, Callable[[], Any]]] = {
    "allreduce": (default_hooks.allreduce_hook, lambda: None),
    "fp16": (default_hooks.fp16_compress_hook, lambda: None),
    "fp16_wrapper": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), lambda: None),
    "power_sgd": (powerSGD_hook.powerSGD_hook, _power_sgd),
    "fp16_power_sgd": (default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), _power_sgd),
}


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).to(device())


def _train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()


def distance_from_torch_ddp(hook_name: str) -> float:
    """How far our weights are from torch DDP's after some steps."""
    hook, make_state = HOOKS[hook_name]
    ours, theirs = _model(), _model()
    torch.manual_seed(11)  # some hooks draw random numbers
    build_reducer(ours, comm_hook=hook, comm_state=make_state(), bucket_cap_mb=1000, overlap=True)
    _train(ours, steps=6)
    assert_equal_on_all_ranks(ours)
    torch.manual_seed(11)
    wrapped = DistributedDataParallel(theirs, bucket_cap_mb=1000)
    wrapped.register_comm_hook(make_state(), hook)
    _train(wrapped, steps=6)
    return max((a - b).abs().max().item() for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def post_local_sgd_averages_locally() -> bool:
    """After the warm-up gradients stay local (one rank per subgroup here), so the ranks drift apart."""
    subgroups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    state = post_localSGD_hook.PostLocalSGDState(None, subgroups[dist.get_rank()], start_localSGD_iter=4)
    model = _model()
    build_reducer(model, comm_hook=post_localSGD_hook.post_localSGD_hook, comm_state=state)
    _train(model, steps=2)
    assert_equal_on_all_ranks(model)
    _train(model, steps=6)
    reference = next(model.parameters()).detach().clone()
    dist.broadcast(reference, src=0)
    return torch.equal(reference, next(model.parameters()))


def unused_parameters_with_a_hook() -> None:
    """The flags travel beside what the hook sends."""
    model = nn.ModuleDict({"used": nn.Linear(WIDTH, 4), "elsewhere": nn.Linear(WIDTH, 4), "never": nn.Linear(2, 2)})
    model.to(device())
    build_reducer(model, comm_hook=default_hooks.allreduce_hook)
    for step in range(3):
        model.zero_grad()
        x = batch(dist.get_rank(), step)
        loss = model["used"](x).square().mean()
        if dist.get_rank() == 1:
            loss = loss + model["elsewhere"](x).square().mean()
        loss.backward()
        assert model["elsewhere"].weight.grad is not None
        assert model["never"].weight.grad is None
