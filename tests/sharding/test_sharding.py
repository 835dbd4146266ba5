"""With `shard_optimizer` the weights are those of a run without it, and each rank has a shard of the state."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.sharding.shards import ShardOption, Shards
from tests.support.cases import for_each
from tests.support.collectives import all_reduced
from tests.support.jobs.sharding import Outcome, Run, compare
from tests.support.ranks import device, on_ranks, raised_by, run_on_ranks

NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda gradient: gradient.norm(),
    "largest": lambda gradient: gradient.norm(float("inf")),
    "number": lambda gradient: torch.linalg.vector_norm(gradient, 0),
    "fro": lambda gradient: torch.norm(gradient),
    "vector_norm": lambda gradient: torch.linalg.vector_norm(gradient, ord=2, dtype=torch.float64),
    "detached": lambda gradient: gradient.detach().norm(),
    "_foreach_norm": lambda gradient: torch._foreach_norm([gradient, torch.ones(3)], 2)[0],
    "total": lambda gradient: (
        nn.utils.get_total_norm([gradient]) if hasattr(nn.utils, "get_total_norm") else gradient.norm()
    ),
}


READS: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda gradient: gradient.mean(),
    "__getitem__": lambda gradient: gradient[0],
    "numpy": lambda gradient: gradient.numpy(),
    "stack": lambda gradient: torch.stack([gradient, gradient]),
    "_foreach_add_": lambda gradient: torch._foreach_add_([torch.zeros(gradient.shape)], [gradient]),
    "norm": lambda gradient: gradient.norm(dim=0),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "adam": lambda gradient: torch.optim.Adam([_with_gradient(gradient)], foreach=False).step(),
}


def _with_gradient(gradient: Tensor) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(gradient.shape))
    param.grad = gradient
    return param


ACCESSES: dict[str, Callable[[Any, Tensor], Any]] = {
    "state_dict": lambda model, _: model.state_dict()["2.weight"],
    "deepcopy": lambda model, _: copy.deepcopy(model)[2].weight,
    "save": lambda model, _: _saved_and_loaded(model.state_dict())["2.weight"],
    "numpy": lambda _, param: torch.from_numpy(param.detach().numpy()),
    "functional_call": lambda model, param: torch.func.functional_call(model[2], {}, torch.eye(len(param))).t(),
}


def _saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()))


# An optimizer's kernels may add and multiply in one rounding or in two, depending on where a slice begins.
TOLERANCE = 1e-6
NOT_DENSE = "sparse_embedding"  # which torch's AdamW cannot step


@for_each("optimizer", ["sgd", "adam", "nadam", "rprop", "asgd", "capturable_adam", "signs"])
def test_every_optimizer_takes_the_same_steps(optimizer: str) -> None:
    tolerance = 0.0 if optimizer == "sgd" else TOLERANCE
    ranks = run_on_ranks(compare, case="mlp", optimizer=optimizer, tolerance=tolerance)
    assert sum(sharded.state_numel for _, sharded in ranks) == ranks[0][0].state_numel


@for_each("case", ["conv_batchnorm", "tied_transformer", "many_dtypes", "unused_on_one_rank", "partly_frozen"])
def test_every_model_takes_the_same_steps(case: str) -> None:
    run_on_ranks(compare, case=case, optimizer="adamw", tolerance=TOLERANCE)


@for_each("case", ["channels_last", "complex", "unused_in_turns", "freeze_and_unfreeze"])
def test_every_model_takes_the_same_steps_by_whole_parameters(case: str) -> None:
    # A whole parameter is stepped by the same arithmetic as without sharding.
    ranks = run_on_ranks(compare, case=case, optimizer="adamw", shard="parameters")
    assert_whole([sharded for _, sharded in ranks])


def assert_whole(ranks: list[Outcome]) -> None:
    """Assert that each parameter is of one rank."""
    for name in ranks[0].ranges:
        numel = ranks[0].weights[name].numel()
        assert sorted(rank.ranges[name] for rank in ranks)[-1] == (0, numel)
        assert sum(stop - start for rank in ranks for start, stop in [rank.ranges[name]]) == numel


@pytest.mark.parametrize(
    ("case", "shard"),
    [
        ("channels_last", True),
        ("complex", "parameters"),
        ("unused_in_turns", True),
        ("freeze_and_unfreeze", "parameters"),
    ],
)
def test_four_ranks_take_the_same_steps(case: str, shard: bool | str) -> None:
    # More than two ranks add in an order that depends on where a number lies in its bucket. A step that divides by the
    # size of a gradient makes much of that where it is about zero, so these train in double precision.
    setting: dict[str, Any] = {"case": case, "optimizer": "adamw", "shard": shard, "clip": 0.1}
    run_on_ranks(compare, world_size=4, **setting, is_double=True, tolerance=TOLERANCE)


@for_each(("optimizer", "world_size"), [("muon", 2), ("lamb", 4), ("adafactor", 2)])
def test_an_optimizer_that_looks_at_whole_tensors_gets_whole_ones(optimizer: str, world_size: int) -> None:
    setting: dict[str, Any] = {"case": "mlp", "optimizer": optimizer, "is_double": True}
    ranks = run_on_ranks(compare, world_size=world_size, **setting, tolerance=TOLERANCE)
    assert_whole([sharded for _, sharded in ranks])
    assert sum(sharded.state_numel for _, sharded in ranks) == ranks[0][0].state_numel


@for_each("shard", [True, "parameters"])
def test_a_sparse_gradient_stays_on_every_rank(shard: bool | str) -> None:
    for _, sharded in run_on_ranks(compare, case=NOT_DENSE, optimizer="sgd", shard=shard):
        assert sorted(sharded.ranges) == ["head.bias", "head.weight"]


@for_each(
    ("case", "norm_type"),
    [("mlp", 1.0), ("mlp", 2.0), ("mlp", 3.0), ("mlp", math.inf), ("complex", 2.0), ("many_dtypes", math.inf)],
)
def test_clipping_finds_the_same_norm(case: str, norm_type: float) -> None:
    tolerance = 1e-2 if case == "many_dtypes" else TOLERANCE  # bfloat16
    run_on_ranks(compare, case=case, optimizer="sgd", clip=0.01, norm_type=norm_type, tolerance=tolerance)


@on_ranks()
def test_a_gradient_that_was_kept_over_a_backward_is_refused() -> None:
    """Reading it is refused, and so are stepping and adding to it."""
    run = Run(optimizer="sgd").train(range(1))
    run.differentiate(1)
    kept = [param.grad for param in run.model.parameters()]
    run.inner.step()
    run.inner.zero_grad()
    run.differentiate(2)
    errors = [raised_by(lambda one=one: one.mean()) for one in kept]  # type: ignore[misc]
    errors += [raised_by(lambda one=one: one.norm()) for one in kept]  # type: ignore[misc]
    for param, gradient in zip(run.model.parameters(), kept, strict=True):
        param.grad = gradient
    errors += [raised_by(run.inner.step), raised_by(lambda: run.differentiate(3))]
    assert all(" reads the gradient of `" in error for error in errors), errors


@for_each("foreach", [True, None])
@on_ranks()
def test_the_norm_of_all_gradients_takes_one_exchange(foreach: bool | None) -> None:
    run = Run(shard=True)
    run.differentiate(0)
    with all_reduced() as reduced:
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1, foreach=foreach)
    assert len(reduced) == 1


@for_each("shard", [True, "parameters"])
def test_gradients_that_were_accumulated_are_divided(shard: bool | str) -> None:
    run_on_ranks(compare, case="mlp", optimizer="sgd", micro_batches=3, shard=shard)


# --- Which optimizers


# --- Gradients and weights between steps


@for_each("is_divided", [False, True])
@on_ranks()
def test_a_parameter_of_two_optimizers_is_refused(is_divided: bool) -> None:
    run = Run()
    assert run.shards is not None
    if is_divided:
        run.train([0])
    second = torch.optim.SGD(run.model[0].parameters(), lr=0.1)  # type: ignore[index]
    assert raised_by(lambda: run.shards.add(second)) == (  # type: ignore[union-attr]
        "ValueError: A parameter of shape (32, 8) belongs to two optimizers, `AdamW` and `SGD`: its state cannot be"
        " divided. Give each parameter to one optimizer, or set `shard_optimizer=False`."
    )
    run.train([1])  # as before


@pytest.mark.parametrize("shard", [True, "parameters"])
@on_ranks()
def test_a_divided_gradient_is_read_by_norms_and_refuses_other_readers(shard: ShardOption) -> None:
    whole, sharded = Run(shard=False), Run(shard=shard)
    with sharded.reducer.no_sync():
        sharded.differentiate(0)
    # Gradients of this rank alone: they can be read, and are a part of the average later.
    of_rank = {name: param.grad.tolist() for name, param in sharded.model.named_parameters() if param.grad is not None}
    assert len(of_rank) == len(list(sharded.model.parameters()))
    sharded.inner.zero_grad()
    for run in (whole, sharded):
        run.differentiate(1)
    gradient = sharded.model[2].weight.grad  # type: ignore[index]
    expected = whole.model[2].weight.grad  # type: ignore[index]
    assert sharded.shards is not None
    for mine, others in zip(sharded.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(sharded.shards.full_gradient(mine), others.grad, rtol=0, atol=0)
        for name, norm in NORMS.items():
            torch.testing.assert_close(norm(mine.grad), norm(others.grad), msg=name)  # type: ignore[arg-type]
    assert (gradient.shape, gradient.dtype, len(gradient)) == (expected.shape, expected.dtype, len(expected))
    errors = {name: raised_by(partial(read, gradient)) for name, read in READS.items()}
    rank = dist.get_rank()
    num_own = 512 if shard is True else 1024 * (repr(gradient).endswith("1024 of 1024 elements>"))
    own = f"of which rank {rank} of 2 has {num_own} of 1024 elements"
    assert repr(gradient) == f"<gradient of `2.weight`, {own}>"
    for name, error in errors.items():
        assert error == (
            f"ShardedGradientError: `{'lerp_' if name == 'adam' else name}` reads the gradient of `2.weight`,"
            f" {own}: `shard_optimizer` divides gradients among the ranks once they are averaged. Clipping, norms"
            " and changes element by element work as usual. For all of it call `strategy.full_gradient(param)` on"
            " every rank, or set `shard_optimizer=False`."
        )


def _set_data(gradient: Tensor) -> None:
    gradient.data = torch.ones(gradient.shape)


_MIXING = torch.ones(6, 6)
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda gradient: gradient.mul_(2),
    "rows": lambda gradient: gradient.__setitem__(slice(0, 2), 0.0),
    "noise": lambda gradient: gradient.add_(torch.ones_like(gradient) + gradient.new_zeros(1)),
    "data.add_": lambda gradient: gradient.data.add_(1),
    "detach_": lambda gradient: gradient.detach_().mul_(2),
    "masked_fill_": lambda gradient: gradient.masked_fill_(torch.eye(6) > 0, 3.0),
    "lerp_": lambda gradient: gradient.lerp_(torch.ones(6, 6), 0.5),
    "copy_": lambda gradient: gradient.copy_(torch.arange(36.0).view(6, 6)),
    "foreach": lambda gradient: torch._foreach_mul_([gradient], torch.tensor(0.5)),
    "zeroed by an optimizer": lambda gradient: torch.optim.SGD([_with_gradient(gradient)]).zero_grad(set_to_none=False),
}
REFUSED_CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "addmm_": lambda gradient: gradient.addmm_(_MIXING, _MIXING),
    "baddbmm_": lambda gradient: gradient.unsqueeze(0).baddbmm_(_MIXING[None], _MIXING[None]),
    "permuted": lambda gradient: gradient.__setitem__(torch.tensor([1, 0]), gradient),
    "twice itself": lambda gradient: gradient.add_(gradient),
    "sort": lambda gradient: torch.sort(gradient, out=(gradient, torch.empty(0, dtype=torch.long))),
    "renorm_": lambda gradient: gradient.renorm_(2, 0, 0.01),
    "t_": lambda gradient: gradient.t_(),
    "data": _set_data,
}


@on_ranks()
def test_a_divided_gradient_is_changed_as_without_sharding_or_the_change_is_refused() -> None:
    """Element by element it can be changed."""
    collectives = Collectives(device())
    model: Any = nn.Linear(6, 6)
    shards = Shards(collectives, whole_parameters=False)
    reducer = Reducer(Replicas(model, collectives), ReducerConfig(bucket_cap_mb=1), maker=shards)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    shards.add(optimizer)
    for name, change in {**CHANGES, **REFUSED_CHANGES}.items():
        optimizer.zero_grad()
        with reducer.backward():
            model(torch.full((2, 6), collectives.rank + 1.0)).square().mean().backward()
        expected: Any = shards.full_gradient(model.weight)
        if name in REFUSED_CHANGES:
            assert raised_by(partial(change, model.weight.grad)).startswith("ShardedGradientError"), name
            continue
        change(model.weight.grad)
        change(expected)
        with torch.no_grad():
            model.weight.zero_()
        optimizer.step()
        assert torch.equal(-model.weight, expected), name
    reducer.close()


@pytest.mark.parametrize("shard", [True, "parameters"])
@on_ranks()
def test_when_a_step_returns_all_accesses_give_the_new_weights(shard: ShardOption) -> None:
    """Also by aliases that were made before the first step."""
    run = Run(shard=shard)
    whole = Run(shard=False)
    param = run.model[2].weight  # type: ignore[index]
    state = run.model.state_dict()
    aliases = [param.data, param.detach(), param.detach().view(-1).view(param.shape), state["2.weight"]]
    for step, (name, access) in enumerate(ACCESSES.items()):
        whole.train([step])
        run.train([step])
        expected = whole.model[2].weight.detach()  # type: ignore[index]
        for alias in aliases:
            torch.testing.assert_close(alias, expected, rtol=1e-5, atol=1e-5, msg=name)
        seen = access(run.model, param)
        torch.testing.assert_close(seen.detach(), expected, rtol=1e-5, atol=1e-5, msg=name)
    torch.testing.assert_close(run.weights, whole.weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("at", ["exchange", "optimizer"])
@on_ranks()
def test_weights_of_a_step_that_has_failed_are_partial_until_the_next(at: str) -> None:
    run = Run(optimizer="signs").train(range(2))
    assert run.shards is not None
    partial_by_step = [run.shards.is_partial]
    run.inner.zero_grad()
    run.differentiate(2)
    place: tuple[Any, str] = (run.collectives, "start_gather_of_shards") if at == "exchange" else (Tensor, "lerp_")
    with patch.object(*place, side_effect=RuntimeError("lost")):
        assert raised_by(run.inner.step) == "RuntimeError: lost"
    partial_by_step += [run.shards.is_partial and not run.shards.have_arrived]
    run.train([3])
    assert [*partial_by_step, run.shards.is_partial or not run.shards.have_arrived] == [False, True, False]
