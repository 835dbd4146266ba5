"""Losses and gradients that are not finite on some rank, given to the reducer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_bucketddp.reducer.nonfinite import NonFiniteError
from lightning_bucketddp.reducer.reducer import Reducer
from tests.support.collectives import all_reduced
from tests.support.jobs.comm_hooks import HOOKS
from tests.support.jobs.models import CASES, WIDTH, batch
from tests.support.jobs.parity import build_reducer
from tests.support.ranks import device

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
    tells_loss: bool = True,
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
    with collected_warnings() as warnings, all_reduced() as reduced:
        try:
            for step in range(steps):
                if step in leaves_out:
                    continue
                optimizer.zero_grad()
                for micro_batch in range(micro_batches):
                    with nullcontext() if micro_batch == micro_batches - 1 else reducer.no_sync():
                        loss = CASES[case].loss(model, dist.get_rank(), 10 * step + micro_batch)
                        is_bad = bad is not None and micro_batch == bad.micro_batch % micro_batches
                        with _made_bad(model, bad if is_bad and step == bad.step else None):  # type: ignore[union-attr]
                            _backward(reducer, _bad_loss(loss, bad if is_bad else None, step), tells_loss=tells_loss)
                if clips:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                if reducer.finiteness.withholds(optimizer):
                    withheld.append(step)
                    # For an optimizer that nobody keeps from stepping.
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


def _backward(reducer: Reducer, loss: Tensor, *, tells_loss: bool) -> None:
    if tells_loss:
        reducer.finiteness.see_loss(loss)
    with reducer.backward():
        loss.backward()


def _bad_loss(loss: Tensor, bad: Bad | None, step: int) -> Tensor:
    if bad is None or bad.parameter is not None or step != bad.step or dist.get_rank() not in bad.ranks:
        return loss
    # As it is for the gradients, which stay finite.
    return loss + loss.new_tensor(bad.value)


@contextmanager
def _made_bad(model: nn.Module, bad: Bad | None) -> Iterator[None]:
    """Inside, a backward puts the value into the first element of the parameter's gradient."""
    if bad is None or bad.parameter is None or dist.get_rank() not in bad.ranks:
        yield
        return
    handle = model.get_parameter(bad.parameter).register_hook(_with_first_element(bad.value))
    yield
    handle.remove()


def _with_first_element(value: float) -> Callable[[Tensor], Tensor]:
    def replace(gradient: Tensor) -> Tensor:
        if gradient.is_sparse:
            values = gradient._values().clone()
            values.view(-1)[0] = value
            return torch.sparse_coo_tensor(gradient._indices(), values, gradient.shape)
        changed = gradient.clone()
        # The imaginary part of a complex number, as the less likely to be looked at.
        reals = torch.view_as_real(changed).view(-1)[1:] if changed.is_complex() else changed.view(-1)
        reals[0] = value
        return changed

    return replace


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collects what the package warns of on this rank."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collector(logging.WARNING)
    logger = logging.getLogger("lightning_bucketddp")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def largest_numbers(dtype: torch.dtype) -> int:
    """How many steps are called not finite whose gradients are as large as their sum over the ranks may be."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(device(), dtype)
    reducer = build_reducer(layers)
    largest = torch.finfo(dtype).max / dist.get_world_size()
    for _ in range(3):
        layers.zero_grad()
        signs = zip([1, -1, 1, -1], layers.parameters(), strict=True)
        with reducer.backward():
            torch.stack([(param * sign * largest).sum() for sign, param in signs]).sum().backward()
        assert all(param.grad is not None and param.grad.abs().eq(largest).all() for param in layers.parameters())
    return reducer.stats.num_nonfinite


def parameter_that_is_no_longer_used() -> list[int]:
    """How many bad steps are counted after each of three: what the first has left in a bucket must not count again."""
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
    return counts


def players_in_turns(*, both_backwards_first: bool) -> list[str]:
    """Whose steps are withheld when the critic's first backward is bad on rank 1, and goes through both players."""
    model = nn.ModuleDict({"generator": nn.Linear(WIDTH, 4), "critic": nn.Linear(4, 1)}).to(device())
    reducer = build_reducer(model, on_nonfinite="skip")
    optimizers = {name: torch.optim.SGD(player.parameters(), lr=0.1) for name, player in model.items()}
    withheld = []

    def backward(name: str, step: int) -> None:
        loss = model["critic"](model["generator"](batch(dist.get_rank(), step))).square().mean()
        is_bad = (name, step, dist.get_rank()) == ("critic", 1, 1)
        with reducer.backward():
            (loss * math.nan if is_bad else loss).backward()

    def take_step(name: str, step: int) -> None:
        if reducer.finiteness.withholds(optimizers[name]):
            withheld.append(f"{name} {step}")
            optimizers[name].zero_grad()
        else:
            optimizers[name].step()

    for step in range(3):
        for name in optimizers if both_backwards_first else ():
            optimizers[name].zero_grad()
        for name in ("critic", "generator"):
            if not both_backwards_first:
                optimizers[name].zero_grad()
            backward(name, step)
            if not both_backwards_first:
                take_step(name, step)
        for name in optimizers if both_backwards_first else ():
            take_step(name, step)
    assert all(param.isfinite().all() for param in model.parameters())
    return withheld
