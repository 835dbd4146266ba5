"""With `shard_optimizer` the weights are those of a run without it, and each rank has its part of the state."""

from __future__ import annotations

import gc
import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.reducer.plan_cache import _ALONE_FROM_BYTES
from lightning_bucketddp.sharding.bucket import ShardedInPlaceBucket
from lightning_bucketddp.sharding.gradient import ShardedGradient
from tests.support.cases import for_each
from tests.support.jobs.models import CASES
from tests.support.jobs.sharding import (
    OPTIMIZERS,
    READS,
    WHOLE_TENSOR_OPTIMIZERS,
    Outcome,
    Run,
    clip,
    compare,
    compile_steps,
    keep_a_gradient,
    look_at_gradients,
    look_at_weights,
    raised_by,
    share_a_parameter,
    step_after_one_that_raised,
)
from tests.support.ranks import device, run_on_ranks

# An optimizer's kernels may add and multiply in one rounding or in two, depending on where a slice begins.
TOLERANCE = 1e-6
# More than two ranks add in an order that depends on where a number lies in its bucket. A step that divides by the size
# of a gradient makes much of that where it is about zero, so these train in double precision.
# Those for whose optimizer some parameter is not a slice, or that torch's AdamW cannot step.
NOT_DENSE = "sparse_embedding"
SPECIAL = ["channels_last", "complex", "unused_in_turns", "freeze_and_unfreeze"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.sampled(4)
def test_every_optimizer_takes_the_same_steps(optimizer: str) -> None:
    tolerance = 0.0 if optimizer == "sgd" else TOLERANCE
    ranks = run_on_ranks(compare, case="mlp", optimizer=optimizer, tolerance=tolerance)
    assert sum(sharded.state_numel for _, sharded in ranks) == ranks[0][0].state_numel


@pytest.mark.parametrize("case", [case for case in CASES if case != NOT_DENSE])
@pytest.mark.sampled(5)
def test_every_model_takes_the_same_steps(case: str) -> None:
    run_on_ranks(compare, case=case, optimizer="adamw", tolerance=TOLERANCE)


@for_each("case", SPECIAL)
def test_every_model_takes_the_same_steps_by_whole_parameters(case: str) -> None:
    # A whole parameter is stepped by the same arithmetic as without sharding.
    ranks = run_on_ranks(compare, case=case, optimizer="adamw", shard="parameters")
    assert_whole([sharded for _, sharded in ranks])


def assert_whole(ranks: list[Outcome]) -> None:
    """Assert that each parameter is of one rank."""
    for name in ranks[0].pieces:
        numel = ranks[0].weights[name].numel()
        assert sorted(rank.pieces[name] for rank in ranks)[-1] == (0, numel)
        assert sum(stop - start for rank in ranks for start, stop in [rank.pieces[name]]) == numel


@pytest.mark.parametrize(
    ("case", "shard"),
    [
        *(("mlp", shard) for shard in (True, "parameters")),
        ("channels_last", True),
        ("complex", "parameters"),
        ("unused_in_turns", True),
        ("freeze_and_unfreeze", "parameters"),
    ],
)
def test_four_ranks_take_the_same_steps(case: str, shard: bool | str) -> None:
    setting: dict[str, Any] = {"case": case, "optimizer": "adamw", "shard": shard, "clip": 0.1}
    run_on_ranks(compare, world_size=4, **setting, is_double=True, tolerance=TOLERANCE)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("optimizer", WHOLE_TENSOR_OPTIMIZERS)
@pytest.mark.sampled(3)
def test_an_optimizer_that_looks_at_whole_tensors_gets_whole_ones(optimizer: str, world_size: int) -> None:
    setting: dict[str, Any] = {"case": "mlp", "optimizer": optimizer, "is_double": True}
    ranks = run_on_ranks(compare, world_size=world_size, **setting, tolerance=TOLERANCE)
    assert_whole([sharded for _, sharded in ranks])
    assert sum(sharded.state_numel for _, sharded in ranks) == ranks[0][0].state_numel


@for_each("shard", [True, "parameters"])
def test_a_sparse_gradient_stays_on_every_rank(shard: bool | str) -> None:
    for _, sharded in run_on_ranks(compare, case=NOT_DENSE, optimizer="sgd", shard=shard):
        assert sorted(sharded.pieces) == ["head.bias", "head.weight"]


@for_each(
    ("case", "norm_type"),
    [("mlp", 1.0), ("mlp", 2.0), ("mlp", 3.0), ("mlp", math.inf), ("complex", 2.0), ("many_dtypes", math.inf)],
)
def test_clipping_finds_the_same_norm(case: str, norm_type: float) -> None:
    tolerance = 1e-2 if case == "many_dtypes" else TOLERANCE  # bfloat16
    run_on_ranks(compare, case=case, optimizer="sgd", clip=0.01, norm_type=norm_type, tolerance=tolerance)


def test_a_gradient_that_was_kept_over_a_backward_is_refused() -> None:
    for errors in run_on_ranks(keep_a_gradient):
        assert all(" reads the gradient of `" in error for error in errors), errors


@for_each("foreach", [True, None])
def test_the_norm_of_all_gradients_takes_one_exchange(foreach: bool | None) -> None:
    assert run_on_ranks(clip, foreach=foreach) == [1, 1]


@for_each("shard", [True, "parameters"])
def test_gradients_that_were_accumulated_are_divided(shard: bool | str) -> None:
    run_on_ranks(compare, case="mlp", optimizer="sgd", micro_batches=3, shard=shard)


# --- Which optimizers


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    for error in run_on_ranks(share_a_parameter):
        assert error == (
            "ValueError: A parameter of shape (32, 8) belongs to two optimizers, `AdamW` and `SGD`: its state cannot be"
            " divided. Give each parameter to one optimizer, or set `shard_optimizer=False`."
        )


def test_an_optimizer_that_has_raised_steps_again() -> None:
    run_on_ranks(step_after_one_that_raised)


@pytest.mark.long
@pytest.mark.parametrize(("shard", "of"), [(True, "method"), ("parameters", "function")])
def test_a_compiled_step_is_the_same(shard: bool | str, of: str) -> None:
    assert all(num_compiled > 1 for num_compiled in run_on_ranks(compile_steps, of=of, shard=shard, timeout_s=120))


# --- Gradients and weights between steps


@pytest.mark.parametrize("shard", [True, "parameters"])
def test_a_divided_gradient_is_read_by_norms_and_refuses_other_readers(shard: bool | str) -> None:
    for rank, errors in enumerate(run_on_ranks(look_at_gradients, shard=shard)):
        num_own = 512 if shard is True else 1024 * (errors["repr"].endswith("1024 of 1024 elements>"))
        share = f"of which rank {rank} of 2 has {num_own} of 1024 elements"
        assert errors.pop("repr") == f"<gradient of `2.weight`, {share}>"
        assert errors.keys() == READS.keys()
        for name, error in errors.items():
            assert error == (
                f"ShardedGradientError: `{'lerp_' if name == 'adam' else name}` reads the gradient of `2.weight`,"
                f" {share}: `shard_optimizer` divides gradients among the ranks once they are averaged. Clipping, norms"
                " and changes element by element work as usual. For all of it call `strategy.full_gradient(param)` on"
                " every rank, or set `shard_optimizer=False`."
            )


@pytest.mark.parametrize("shard", [True, "parameters"])
def test_when_a_step_returns_whoever_looks_sees_the_new_weights(shard: bool | str) -> None:
    run_on_ranks(look_at_weights, shard=shard)


def fail_in_a_step(*, at: str) -> list[bool]:
    """Return whether weights are torn before a step, after one that raises in it, and after the next."""
    run = Run(optimizer="signs").train(range(2))
    assert run.shards is not None
    torn = [run.shards.is_partial]
    run.inner.zero_grad()
    run.differentiate(2)
    place: tuple[Any, str] = (run.collectives, "start_exchange_of_shares") if at == "exchange" else (Tensor, "lerp_")
    with patch.object(*place, side_effect=RuntimeError("lost")):
        assert raised_by(run.inner.step) == "RuntimeError: lost"
    torn += [run.shards.is_partial and not run.shards.have_arrived]
    run.train([3])
    return [*torn, run.shards.is_partial or not run.shards.have_arrived]


def users_of_large_gradients() -> tuple[int, int]:
    """Return how many tensors use the memory of large gradients, before and after these are gone."""
    with (
        patch.dict(_ALONE_FROM_BYTES, dict.fromkeys(_ALONE_FROM_BYTES, 0)),
        # As on a GPU: gloo's other groups hold tensors a moment longer.
        patch.object(Collectives, "gradient_group", lambda self: self),
    ):
        run = Run().train(range(2))
        run.inner.zero_grad()
        run.differentiate(2)
    assert run.reducer.bucket_set is not None
    large = [one for one in run.reducer.bucket_set.buckets if isinstance(one, ShardedInPlaceBucket)]
    addresses = {bucket.params[0].grad.untyped_storage().data_ptr() for bucket in large}  # type: ignore[union-attr]
    run.inner.step()
    before = _num_users(addresses)
    run.inner.zero_grad()
    return before, _num_users(addresses)


def _num_users(addresses: set[int]) -> int:
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, ShardedGradient)]
    dense = [each for each in tensors if each.layout == torch.strided and each.device == device()]
    return sum(each.untyped_storage().data_ptr() in addresses for each in dense)


def test_a_large_gradient_that_is_gone_leaves_no_memory_behind() -> None:
    for before, after in run_on_ranks(users_of_large_gradients):
        assert before > 0
        assert after == 0


@pytest.mark.parametrize("at", ["exchange", "optimizer"])
def test_weights_of_a_step_that_has_failed_are_torn_until_the_next(at: str) -> None:
    assert run_on_ranks(fail_in_a_step, at=at) == [[False, True, False]] * 2
