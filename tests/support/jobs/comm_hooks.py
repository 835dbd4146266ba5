"""torch's communication hooks, given to our reducer and to torch DDP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel

from tests.support.collectives import all_reduced
from tests.support.jobs.models import WIDTH, batch
from tests.support.jobs.parity import assert_equal_on_all_ranks, build_reducer
from tests.support.ranks import device

Hook = Callable[..., Any]


def _power_sgd() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )


# The hook and what makes its state.
HOOKS: dict[str, tuple[Hook, Callable[[], Any]]] = {
    "allreduce": (default_hooks.allreduce_hook, lambda: None),
    "fp16": (default_hooks.fp16_compress_hook, lambda: None),
    "bf16": (default_hooks.bf16_compress_hook, lambda: None),
    "fp16_wrapper": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), lambda: None),
    "bf16_wrapper": (default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), lambda: None),
    "power_sgd": (powerSGD_hook.powerSGD_hook, _power_sgd),
    "fp16_power_sgd": (default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), _power_sgd),
    # These need what NCCL gives: see `test_a_hook_that_fails_in_torch_ddp_fails_here_for_the_same_reason`.
    "quantization_pertensor": (quantization_hooks.quantization_pertensor_hook, lambda: None),
    "quantization_perchannel": (quantization_hooks.quantization_perchannel_hook, lambda: None),
    # This one runs nowhere.
    "batched_power_sgd": (powerSGD_hook.batched_powerSGD_hook, _power_sgd),
}


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).to(device())


def _train(model: nn.Module, steps: int, *, marked: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        with marked():
            model(batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()


def distance_from_torch_ddp(hook_name: str) -> float:
    """How far our weights are from torch DDP's after some steps."""
    ours, theirs = _train_ours(hook_name), _train_theirs(hook_name)
    assert_equal_on_all_ranks(ours)
    return _distance(ours, theirs)


def failures(hook_name: str) -> list[str | None]:
    """What training raises with torch DDP and with ours."""
    return [_raised_by(lambda: _train_theirs(hook_name)), _raised_by(lambda: _train_ours(hook_name))]


def _raised_by(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def dtype_sent(hook_name: str) -> str:
    """What the gradients travel as."""
    with all_reduced() as tensors:
        _train_ours(hook_name)
    return str(max(tensors, key=Tensor.numel).dtype)


def power_sgd_in_several_buckets() -> float:
    """How far weights are from those without overlap; torch DDP comes to a standstill now and then on gloo."""
    overlapping, waiting = (_train_ours("power_sgd", bucket_cap_mb=0.01, overlap=overlap) for overlap in (True, False))
    assert_equal_on_all_ranks(overlapping)
    return _distance(overlapping, waiting)


def _train_ours(hook_name: str, *, bucket_cap_mb: float = 1000, overlap: bool = True) -> nn.Module:
    hook, make_state = HOOKS[hook_name]
    model = _model()
    torch.manual_seed(11)  # some hooks draw random numbers
    reducer = build_reducer(
        model, comm_hook=hook, comm_state=make_state(), bucket_cap_mb=bucket_cap_mb, overlap=overlap
    )
    _train(model, steps=6, marked=reducer.backward)
    return model


def _train_theirs(hook_name: str) -> nn.Module:
    hook, make_state = HOOKS[hook_name]
    model = _model()
    torch.manual_seed(11)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1000)
    # Wrapped, because torch DDP refuses the bf16 hooks on a CPU by their names.
    wrapped.register_comm_hook(make_state(), lambda state, bucket: hook(state, bucket))
    _train(wrapped, steps=6)
    return model


def _distance(a: nn.Module, b: nn.Module) -> float:
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))


def post_local_sgd_averages_locally() -> bool:
    """After the warm-up gradients stay local (one rank per subgroup here), so the ranks drift apart."""
    subgroups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    state = post_localSGD_hook.PostLocalSGDState(None, subgroups[dist.get_rank()], start_localSGD_iter=4)
    model = _model()
    reducer = build_reducer(model, comm_hook=post_localSGD_hook.post_localSGD_hook, comm_state=state)
    _train(model, steps=2, marked=reducer.backward)
    assert_equal_on_all_ranks(model)
    _train(model, steps=6, marked=reducer.backward)
    reference = next(model.parameters()).detach().clone()
    dist.broadcast(reference, src=0)
    return torch.equal(reference, next(model.parameters()))


def _resizing_hook(_state: Any, bucket: Any) -> Any:
    """Pads the buffer while it is at work, as batched PowerSGD does."""
    buffer = bucket.buffer()
    size = buffer.numel()
    buffer.resize_(2 * size + 1000)[size:].zero_()
    mean = default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]  # the default group
    return mean.then(lambda _: buffer.resize_(size))


def unused_parameters_with_a_hook(*, resizing: bool) -> None:
    """The flags travel beside what the hook sends."""
    model = nn.ModuleDict({"used": nn.Linear(WIDTH, 4), "elsewhere": nn.Linear(WIDTH, 4), "never": nn.Linear(2, 2)})
    model.to(device())
    reducer = build_reducer(model, comm_hook=_resizing_hook if resizing else default_hooks.allreduce_hook)
    for step in range(3):
        model.zero_grad()
        x = batch(dist.get_rank(), step)
        loss = model["used"](x).square().mean()
        if dist.get_rank() == 1:
            loss = loss + model["elsewhere"](x).square().mean()
        with reducer.backward():
            loss.backward()
        assert model["elsewhere"].weight.grad is not None
        assert model["never"].weight.grad is None
