"""Losses and gradients that are not finite: found in their step, with rank and parameter, and kept from the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_bucketddp.reducer.nonfinite import NonFiniteError
from lightning_bucketddp.reducer.reducer import Reducer
from tests.reducer.test_comm_hooks import HOOKS
from tests.support.cases import for_each
from tests.support.collectives import all_reduced
from tests.support.jobs.models import CASES, WIDTH, batch
from tests.support.jobs.parity import build_reducer
from tests.support.ranks import device, on_ranks, run_on_ranks
from tests.support.scripts.trainers import lines_logged

SMALL_BUCKETS_MB = 40 / 2**20
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one_bucket": {"bucket_cap_mb": 25.0},
    "without_overlap": {"overlap": False},
    "bf16_wire": {"reduce_dtype": "bf16"},
    "fp16_wire": {"reduce_dtype": "fp16"},
    "int8_wire": {"reduce_dtype": "int8"},
    "all_alone": {"all_alone": True},
    "hook": {"comm_hook": default_hooks.allreduce_hook},
    "compressing_hook": {"comm_hook": default_hooks.fp16_compress_hook},
}


@dataclass(frozen=True)
class Bad:
    """A value in the loss, or in the gradient of a parameter, at a step (from 0) of some ranks."""

    parameter: str | None
    value: float = math.nan
    step: int = 1
    ranks: Sequence[int] = (1,)
    micro_batch: int = -1

    def comes_at(self, step: int, micro_batch: int, *, of: int) -> bool:
        return (step, micro_batch) == (self.step, self.micro_batch % of) and dist.get_rank() in self.ranks


@dataclass(frozen=True)
class Outcome:
    """What training came to: the error, the warnings on this rank, and counts."""

    error: str = ""
    warnings: list[str] = field(default_factory=list)
    steps_withheld: list[int] = field(default_factory=list)
    num_nonfinite: int = 0
    num_all_reduces: int = 0
    num_reductions: int = 0
    weights: list[Tensor] = field(default_factory=list)


def train(
    *,
    case: str = "mlp",
    bad: Bad | None = None,
    steps: int = 3,
    micro_batches: int = 1,
    reads_late: bool = False,
    clips: bool = False,
    checks_loss: bool = True,
    leaves_out: Sequence[int] = (),
    hook_with_state: str | None = None,
    **options: Any,
) -> Outcome:
    """Some steps with a reducer; what is withheld from the optimizer is not used."""
    torch.manual_seed(3)
    model = CASES[case].build().to(device())
    if hook_with_state is not None:
        hook, make_state = HOOKS[hook_with_state]
        options = {**options, "comm_hook": hook, "comm_state": make_state()}
    reducer = build_reducer(model, **{"bucket_cap_mb": SMALL_BUCKETS_MB, **options})
    reducer.finiteness.reads_late = reads_late or reducer.finiteness.reads_late
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if case == "sparse_embedding" else 0.9)
    withheld = []
    error = ""
    with lines_logged("lightning_bucketddp") as warnings, all_reduced() as reduced:
        try:
            for step in range(steps):
                if step in leaves_out:
                    continue
                optimizer.zero_grad()
                for micro_batch in range(micro_batches):
                    with nullcontext() if micro_batch == micro_batches - 1 else reducer.no_sync():
                        loss = CASES[case].loss(model, dist.get_rank(), 10 * step + micro_batch)
                        hooks: list[Any] = []
                        if bad is not None and bad.comes_at(step, micro_batch, of=micro_batches):
                            loss, hooks = _spoil(model, loss, bad)
                        _backward(reducer, loss, checks_loss=checks_loss)
                        for hook in hooks:
                            hook.remove()
                if clips:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                if reducer.finiteness.withholds(optimizer):
                    withheld.append(step)
                    # For an optimizer that steps all the same.
                    assert all(p.grad is None or p.grad.to_dense().eq(0).all() for p in model.parameters())
                else:
                    optimizer.step()
            reducer.finiteness.catch_up(reducer.stats)
        except NonFiniteError as raised:
            error = str(raised)
    reducer.close()
    weights = [param.detach().cpu() for param in model.parameters()]
    stats = reducer.stats
    return Outcome(error, warnings, withheld, stats.num_nonfinite, len(reduced), stats.num_reductions, weights)


def _backward(reducer: Reducer, loss: Tensor, *, checks_loss: bool) -> None:
    if checks_loss:
        reducer.finiteness.check_loss(loss)
    with reducer.backward():
        loss.backward()


def _spoil(model: nn.Module, loss: Tensor, bad: Bad) -> tuple[Tensor, list[Any]]:
    """Put the value into the loss, whose gradients stay finite, or have a hook put it into a gradient."""
    if bad.parameter is None:
        return loss + loss.new_tensor(bad.value), []
    return loss, [model.get_parameter(bad.parameter).register_hook(_with_first_element(bad.value))]


def _with_first_element(value: float) -> Callable[[Tensor], Tensor]:
    def replace(gradient: Tensor) -> Tensor:
        if gradient.is_sparse:
            values = gradient._values().clone()
            values.view(-1)[0] = value
            return torch.sparse_coo_tensor(gradient._indices(), values, gradient.shape)
        changed = gradient.clone()
        # The imaginary part of a complex number, which is easier to miss.
        reals = torch.view_as_real(changed).view(-1)[1:] if changed.is_complex() else changed.view(-1)
        reals[0] = value
        return changed

    return replace


def players_in_turns(*, both_backwards_first: bool) -> list[str]:
    """Whose steps are withheld when the critic's second backward is bad on rank 1, and goes through both players."""
    model = nn.ModuleDict({"generator": nn.Linear(WIDTH, 4), "critic": nn.Linear(4, 1)}).to(device())
    reducer = build_reducer(model, on_nonfinite="skip")
    optimizers = {name: torch.optim.SGD(player.parameters(), lr=0.1) for name, player in model.items()}
    withheld = []
    for step in range(3):
        for turn in (["critic", "generator"],) if both_backwards_first else (["critic"], ["generator"]):
            for name in turn:
                optimizers[name].zero_grad()
            for name in turn:
                loss = model["critic"](model["generator"](batch(dist.get_rank(), step))).square().mean()
                is_bad = (name, step, dist.get_rank()) == ("critic", 1, 1)
                _backward(reducer, loss * math.nan if is_bad else loss, checks_loss=False)
            for name in reversed(turn):
                if reducer.finiteness.withholds(optimizers[name]):
                    withheld.append(f"{name} {step}")
                    optimizers[name].zero_grad()
                else:
                    optimizers[name].step()
    assert all(param.isfinite().all() for param in model.parameters())
    return withheld


WHAT_HELPS = "To find the cause, look at the data of that rank, clip gradients or lower the learning rate"
RAISED = (
    "Not finite in backward 2: {}. No optimizer has used it, the weights are as they were. "
    f"{WHAT_HELPS}; or pass `on_nonfinite='skip'` to the strategy to leave such steps out."
)
WARNED = (
    "bucketddp: not finite in {}: {}. It goes into the weights of all ranks; `on_nonfinite='raise'` or"
    f" `on_nonfinite='skip'` prevents that. {WHAT_HELPS}."
)
SKIPPED = f"bucketddp: not finite in {{}}: {{}}. The optimizer's step is skipped on all ranks. {WHAT_HELPS}."


def trained(world_size: int = 2, **options: Any) -> list[Outcome]:
    return run_on_ranks(train, world_size=world_size, **options)


def raised_on_all(**options: Any) -> str:
    """The error of all ranks, which is one."""
    [error] = {rank.error for rank in trained(on_nonfinite="raise", **options)}
    return error


def named(parameter: str | None, *, rank: int = 1, value: float = math.nan) -> str:
    what = f"the loss on rank {rank} ({value})"
    return what if parameter is None else f"the gradient of `{parameter}` on rank {rank}"


# --- What is found


@for_each(("way", "value"), zip(WAYS, cycle([math.nan, math.inf, -math.inf])))
def test_a_gradient_and_a_loss_are_named_with_their_rank(way: str, value: float) -> None:
    for parameter in ("2.weight", None):
        assert raised_on_all(bad=Bad(parameter, value), **WAYS[way]) == RAISED.format(named(parameter, value=value))


@for_each(
    ("case", "parameter"),
    [
        ("sparse_embedding", "embedding.weight"),
        ("complex", "shift"),
        ("many_dtypes", "layers.2.bias"),
        ("unused_on_one_rank", "left.bias"),
        ("checkpoint_reentrant", "blocks.1.0.weight"),
        ("partly_frozen", "0.bias"),
    ],
)
def test_every_kind_of_gradient_is_checked(case: str, parameter: str) -> None:
    assert raised_on_all(case=case, bad=Bad(parameter)) == RAISED.format(named(parameter))


@for_each("parameter", ["0.bias", None])
def test_one_process_alone_is_checked(parameter: str | None) -> None:
    [rank] = trained(world_size=1, bad=Bad(parameter, ranks=[0]), on_nonfinite="raise")
    assert rank.error == RAISED.format(named(parameter, rank=0))


def test_gradients_of_the_first_backward_are_checked_without_the_loss() -> None:
    error = raised_on_all(bad=Bad("0.weight", step=0), checks_loss=False)
    assert "in backward 1: the gradient of `0.weight` on rank 1" in error


@pytest.mark.parametrize("reads_late", [False, True])
def test_one_process_alone_warns_of_its_loss_and_does_not_check_gradients(reads_late: bool) -> None:
    [rank] = trained(world_size=1, bad=Bad(None, ranks=[0]), on_nonfinite="warn", reads_late=reads_late)
    assert rank.num_nonfinite == 1
    assert "not finite in backward 2: the loss on rank 0 (nan)" in rank.warnings[0]
    assert rank.num_reductions == 0
    [rank] = trained(world_size=1, bad=Bad("0.bias", ranks=[0], step=2), on_nonfinite="warn", reads_late=reads_late)
    assert rank.warnings == []


def test_all_ranks_are_listed() -> None:
    for parameter, what in (
        ("4.bias", "the gradient of `4.bias` on ranks 0, 2"),
        (None, "the loss on rank 0 (nan), rank 2 (nan)"),
    ):
        assert raised_on_all(world_size=3, bad=Bad(parameter, ranks=[0, 2])) == RAISED.format(what)


@for_each(("world_size", "parameter"), [(1, None), (2, "2.weight")])
def test_nothing_is_checked_on_request(world_size: int, parameter: str | None) -> None:
    for rank in trained(world_size, bad=Bad(parameter), on_nonfinite=None):
        assert (rank.error, rank.warnings, rank.num_nonfinite) == ("", [], 0)


def test_a_gradient_that_is_too_large_for_the_wire_is_found() -> None:
    for reduce_dtype, error in (("bf16", ""), ("fp16", RAISED.format(named("2.weight")))):
        assert raised_on_all(bad=Bad("2.weight", 1e5), reduce_dtype=reduce_dtype) == error


@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@on_ranks()
def test_the_largest_finite_numbers_are_finite(dtype: torch.dtype) -> None:
    """Gradients are as large as their sum over the ranks may be."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(device(), dtype)
    reducer = build_reducer(layers)
    largest = torch.finfo(dtype).max / dist.get_world_size()
    for _ in range(3):
        layers.zero_grad()
        signs = zip([1, -1, 1, -1], layers.parameters(), strict=True)
        with reducer.backward():
            torch.stack([(param * sign * largest).sum() for sign, param in signs]).sum().backward()
        assert all(param.grad is not None and param.grad.abs().eq(largest).all() for param in layers.parameters())
    assert reducer.stats.num_nonfinite == 0


@on_ranks()
def test_a_gradient_is_counted_once() -> None:
    """What the first bad step has left in a bucket must not count again."""
    model = nn.ModuleDict({"a": nn.Linear(WIDTH, 4), "b": nn.Linear(WIDTH, 4)}).to(device())
    reducer = build_reducer(model, on_nonfinite="warn")
    counts = []
    for step in range(4):
        model.zero_grad()
        x = batch(dist.get_rank(), step)
        loss = model["a"](x).square().mean()
        if step < 2:
            loss = loss + model["b"](x).square().mean() * (math.nan if step == 1 else 1)
        with reducer.backward():
            loss.backward()
        counts.append(reducer.stats.num_nonfinite)
    assert counts == [0, 1, 1, 1]


# --- What is done


def test_rank_zero_warns_with_the_step_and_warnings_become_rare() -> None:
    # The weights are not finite after the second of twenty steps.
    rank_zero, rank_one = trained(bad=Bad("2.weight"), steps=20)
    assert rank_zero.num_nonfinite == 19
    what = "the loss on rank 0 (nan), rank 1 (nan)"
    assert rank_zero.warnings == [
        WARNED.format("backward 2", named("2.weight")),
        WARNED.format("backward 11 (10 steps so far)", what),
    ]
    assert rank_one.warnings == []


SKIPPED_IN = list(zip(WAYS.values(), cycle(["2.weight", None]), cycle([1, 1, 3, 3])))


@for_each(("way", "parameter", "micro_batches"), [*SKIPPED_IN, ({"case": "sparse_embedding"}, "embedding.weight", 1)])
def test_a_skipped_step_leaves_no_trace_and_costs_no_collective(
    way: dict[str, Any], parameter: str | None, micro_batches: int
) -> None:
    bad = Bad(parameter, micro_batch=0)
    ranks = trained(bad=bad, steps=4, micro_batches=micro_batches, on_nonfinite="skip", **way)
    expected = trained(steps=4, micro_batches=micro_batches, leaves_out=[1], on_nonfinite="skip", **way)
    for rank in ranks:
        assert rank.steps_withheld == [1]
        assert rank.num_nonfinite == 1
        assert all(torch.equal(ours, other) for ours, other in zip(rank.weights, expected[0].weights, strict=True))
    assert ranks[0].warnings == [SKIPPED.format("backward 2", named(parameter))]
    # Flags travel alone beside a hook, and beside what travels as int8.
    is_int8 = way.get("reduce_dtype") == "int8"
    flags_travel_alone = is_int8 or "comm_hook" in way
    for rank, num_steps in [*((rank, 4) for rank in ranks), *((rank, 3) for rank in expected)]:
        others = 0 if is_int8 else rank.num_reductions
        if "case" not in way:  # a sparse gradient is gathered
            assert rank.num_all_reduces == others + num_steps * flags_travel_alone


@pytest.mark.parametrize("step", [1, 4], ids=["before_it_compresses", "when_it_compresses"])
def test_a_hook_with_a_memory_does_not_keep_it(step: int) -> None:
    ranks = trained(bad=Bad("2.weight", step=step), steps=8, on_nonfinite="skip", hook_with_state="power_sgd")
    for rank in ranks:
        assert rank.steps_withheld == [step]
        assert all(weight.isfinite().all() for weight in rank.weights)
    assert "`2.weight`" in ranks[0].warnings[0]


def test_only_the_optimizers_whose_gradients_are_bad_are_kept_from_stepping() -> None:
    assert run_on_ranks(players_in_turns, both_backwards_first=False) == [["critic 1"]] * 2
    assert run_on_ranks(players_in_turns, both_backwards_first=True) == [["generator 1", "critic 1"]] * 2


# --- Late, as on a GPU


@pytest.mark.parametrize("step", [1, 2])
def test_a_late_warning_names_step_and_parameter(step: int) -> None:
    # After the second one nothing but the end follows.
    rank_zero, _ = trained(bad=Bad("2.weight", step=step), steps=3, reads_late=True)
    assert rank_zero.warnings[0] == WARNED.format(f"backward {step + 1}", "the gradient of `2.weight` on rank 1")


def test_a_late_warning_names_the_bucket_where_clipping_has_spread_it() -> None:
    rank_zero, _ = trained(bad=Bad("4.bias"), reads_late=True, clips=True)
    assert rank_zero.warnings[0].startswith("bucketddp: not finite in backward 2: the gradients of ")
    assert "`4.bias`" in rank_zero.warnings[0]
    assert "`0.weight`" not in rank_zero.warnings[0]
