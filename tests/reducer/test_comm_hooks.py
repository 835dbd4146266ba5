"""torch's communication hooks run unmodified, on gloo too."""

from __future__ import annotations

import pytest
import torch

from tests.support.cases import for_each
from tests.support.jobs import comm_hooks
from tests.support.ranks import device, run_on_ranks
from tests.support.scripts.hooks import HOOKS, train_with_hook

# PowerSGD adds up in its own order.
TOLERANCE = {
    "allreduce": 0.0,
    "fp16": 0.0,
    "bf16": 0.0,
    "fp16_wrapper": 0.0,
    "bf16_wrapper": 0.0,
    "power_sgd": 1e-6,
    "fp16_power_sgd": 1e-6,
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
ON_GLOO = device().type == "cpu"


@for_each("hook_name", [*TOLERANCE, *([] if ON_GLOO else QUANTIZATION)])
def test_a_hook_gives_what_it_gives_in_torch_ddp(hook_name: str) -> None:
    check_distance(hook_name)


def check_distance(hook_name: str) -> None:
    for distance in run_on_ranks(comm_hooks.distance_from_torch_ddp, hook_name=hook_name):
        assert distance <= {**TOLERANCE, **QUANTIZATION}[hook_name]


@for_each("hook_name", [*(QUANTIZATION if ON_GLOO else []), "batched_power_sgd"])
def test_a_hook_that_fails_in_torch_ddp_fails_here_for_the_same_reason(hook_name: str) -> None:
    failures = run_on_ranks(comm_hooks.failures, hook_name=hook_name)
    if failures == [[None, None]] * 2:  # since torch 2.15
        check_distance(hook_name)
        return
    for theirs, ours in failures:
        assert [reason for reason in WHY_IT_FAILS[hook_name] if reason in theirs and reason in ours]


def test_every_hook_is_tried() -> None:
    assert comm_hooks.HOOKS.keys() == {*TOLERANCE, *WHY_IT_FAILS}


@for_each(
    ("hook_name", "dtype"),
    [("allreduce", "torch.float32"), ("fp16_wrapper", "torch.float16"), ("bf16", "torch.bfloat16")],
)
def test_a_compressed_gradient_travels_compressed(hook_name: str, dtype: str) -> None:
    assert run_on_ranks(comm_hooks.dtype_sent, hook_name=hook_name) == [dtype, dtype]


def test_power_sgd_runs_in_several_buckets() -> None:
    assert run_on_ranks(comm_hooks.power_sgd_in_several_buckets, timeout_s=30) == [0, 0]


def test_post_local_sgd_averages_in_its_subgroup() -> None:
    assert run_on_ranks(comm_hooks.post_local_sgd_averages_locally) == [True, False]


@for_each("resizing", [False, True])
def test_unused_parameters_are_known_beside_a_hook(resizing: bool) -> None:
    run_on_ranks(comm_hooks.unused_parameters_with_a_hook, resizing=resizing)


@pytest.mark.parametrize("hook", list(HOOKS))
@pytest.mark.sampled(3)
def test_a_hook_given_to_the_strategy_gives_what_it_gives_in_ddp(hook: str) -> None:
    # Seven steps: post-localSGD has averaged after the fifth, and the ranks are apart again.
    ours = run_on_ranks(train_with_hook, hook=hook, like_ddp=False, max_steps=7)
    theirs = run_on_ranks(train_with_hook, hook=hook, like_ddp=True, max_steps=7)
    tolerance = TOLERANCE.get(hook, 0.0)
    for weights, expected in zip(ours, theirs, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(torch.tensor(weights[name]), torch.tensor(value), rtol=0, atol=tolerance)
    assert (ours[0] == ours[1]) == (hook != "post_local_sgd")


def test_post_local_sgd_averages_the_model_in_its_period() -> None:
    rank_zero, rank_one = run_on_ranks(train_with_hook, hook="post_local_sgd", like_ddp=False, max_steps=10)
    assert rank_zero == rank_one
