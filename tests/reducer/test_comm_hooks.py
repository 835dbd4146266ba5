"""torch's communication hooks run unmodified, on gloo too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

from tests.support.cases import for_each
from tests.support.collectives import all_reduced
from tests.support.jobs.models import WIDTH, batch
from tests.support.jobs.parity import assert_equal_on_all_ranks, build_reducer
from tests.support.ranks import device, on_ranks, raised_by, run_on_ranks
from tests.support.scripts.hooks import train_with_hook
from tests.support.scripts.trainers import ours_and_ddp

Hook = Callable[..., Any]


def _power_sgd() -> powerSGD_hook.PowerSGDState:
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 0.5}
    return powerSGD_hook.PowerSGDState(None, **options)  # type: ignore[arg-type]


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


def _train_ours(hook_name: str, *, bucket_cap_mb: float = 1000, overlap: bool = True) -> nn.Module:
    hook, make_state = HOOKS[hook_name]
    model = _model()
    torch.manual_seed(11)  # some hooks draw random numbers
    options = {"comm_hook": hook, "comm_state": make_state(), "bucket_cap_mb": bucket_cap_mb, "overlap": overlap}
    reducer = build_reducer(model, **options)
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


def _resizing_hook(_state: Any, bucket: Any) -> Any:
    """Pads the buffer while it is at work, as batched PowerSGD does."""
    buffer = bucket.buffer()
    size = buffer.numel()
    buffer.resize_(2 * size + 1000)[size:].zero_()
    mean = default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]  # the default group
    return mean.then(lambda _: buffer.resize_(size))


# PowerSGD adds up in its own order.
TOLERANCE = {
    **dict.fromkeys(("allreduce", "fp16", "bf16", "fp16_wrapper", "bf16_wrapper"), 0.0),
    **dict.fromkeys(("power_sgd", "fp16_power_sgd"), 1e-6),
}
# Of gradients in 256 steps; the channels are cut elsewhere, because our buckets have padding between the parameters.
QUANTIZATION = {"quantization_pertensor": 1e-6, "quantization_perchannel": 1e-3}

_WANTS_CUDA = "RuntimeError: Invalid device, must be cuda device"  # torch 2.5
WHY_IT_FAILS = {
    # The result of an all-gather is a list of tensors on gloo; the hook takes it for NCCL's one tensor with a row per
    # rank, so that what it indexes is rank 0's part.
    "quantization_pertensor": ("IndexError: invalid index of a 0-dim tensor", _WANTS_CUDA),
    "quantization_perchannel": ("IndexError: too many indices for tensor of dimension 2", _WANTS_CUDA),
    # torch's `_orthogonalize` wants a batch of matrices, and this hook gives it one matrix.
    "batched_power_sgd": ("AssertionError",),
}
TRAVELS_AS = {"allreduce": torch.float32, "fp16_wrapper": torch.float16, "bf16": torch.bfloat16}
ON_GLOO = device().type == "cpu"


def check_distance(hook_name: str) -> None:
    with all_reduced() as reduced:
        ours = _train_ours(hook_name)
    if hook_name in TRAVELS_AS:
        assert max(reduced, key=Tensor.numel).dtype == TRAVELS_AS[hook_name]
    assert_equal_on_all_ranks(ours)
    assert _distance(ours, _train_theirs(hook_name)) <= {**TOLERANCE, **QUANTIZATION}[hook_name]


@for_each("hook_name", [*TOLERANCE, *([] if ON_GLOO else QUANTIZATION)])
@on_ranks()
def test_a_hook_gives_what_it_gives_in_torch_ddp(hook_name: str) -> None:
    check_distance(hook_name)


@for_each("hook_name", [*(QUANTIZATION if ON_GLOO else []), "batched_power_sgd"])
@on_ranks()
def test_a_hook_that_fails_in_torch_ddp_fails_here_for_the_same_reason(hook_name: str) -> None:
    theirs, ours = (raised_by(partial(train, hook_name)) for train in (_train_theirs, _train_ours))
    if theirs == ours == "":  # since torch 2.15
        check_distance(hook_name)
    else:
        assert any(reason in theirs and reason in ours for reason in WHY_IT_FAILS[hook_name])


@on_ranks()
def test_power_sgd_runs_in_several_buckets() -> None:
    """Compare with those without overlap; torch DDP comes to a standstill now and then on gloo."""
    overlapping, waiting = (_train_ours("power_sgd", bucket_cap_mb=0.01, overlap=overlap) for overlap in (True, False))
    assert_equal_on_all_ranks(overlapping)
    assert _distance(overlapping, waiting) == 0


@for_each("resizing", [False, True])
@on_ranks()
def test_unused_parameters_are_known_beside_a_hook(resizing: bool) -> None:
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


@pytest.mark.parametrize("hook", ["bf16_allreduce", "fp16_power_sgd", "post_local_sgd"])
def test_a_hook_given_to_the_strategy_gives_what_it_gives_in_ddp(hook: str) -> None:
    # Seven steps: post-localSGD has averaged after the fifth, and the ranks are apart again.
    ours, theirs = ours_and_ddp(train_with_hook, hook=hook, max_steps=7)
    tolerance = TOLERANCE.get(hook, 0.0)
    for weights, expected in zip(ours, theirs, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(torch.tensor(weights[name]), torch.tensor(value), rtol=0, atol=tolerance)
    assert (ours[0] == ours[1]) == (hook != "post_local_sgd")


def test_post_local_sgd_averages_the_model_in_its_period() -> None:
    rank_zero, rank_one = run_on_ranks(train_with_hook, hook="post_local_sgd", max_steps=10)
    assert rank_zero == rank_one
