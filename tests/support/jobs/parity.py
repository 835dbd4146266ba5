"""Training one model with our reducer beside a reference, step by step, on every rank."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.reducer.observer import ReducerStats
from lightning_bucketddp.reducer.plan_cache import _ALONE_FROM_BYTES
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.replicas import Replicas, SharedBuffers
from lightning_bucketddp.sharding.shards import Shards
from tests.support.collectives import all_reduced
from tests.support.jobs.models import CASES, Case
from tests.support.ranks import device


@dataclass(frozen=True)
class Training:
    """How to train, the same for ours and for the reference."""

    steps: int = 4
    micro_batches: int = 1
    optimizer: str = "sgd"
    clip: str | None = None
    bucket_cap_mb: Any = 25.0
    all_alone: bool = False
    reduce_dtype: str | None = None
    tolerance: float = 0.0


@dataclass(frozen=True)
class Outcome:
    stats: ReducerStats
    num_buckets: int
    num_all_reduces: int


def build_reducer(
    model: nn.Module, *, all_alone: bool = False, shards: Shards | None = None, **options: Any
) -> Reducer:
    """A reducer for `model`, set up as the strategies do it; `all_alone`: it treats each gradient as a large one."""
    replicas = Replicas(model, Collectives(device()))
    replicas.agree()
    replicas.broadcast()
    alone_from = dict.fromkeys(_ALONE_FROM_BYTES, 0) if all_alone else {}
    with patch.dict(_ALONE_FROM_BYTES, alone_from):
        return Reducer(replicas, ReducerConfig(**options), maker=shards)


def torch_ddp_can(case: str) -> bool:
    """Whether the torch that is installed can train this with DistributedDataParallel."""
    kwargs = CASES[case].ddp
    return kwargs is not None and kwargs.keys() <= inspect.signature(DistributedDataParallel).parameters.keys()


def parity_with_torch_ddp(case: str, training: Training) -> Outcome:
    """Train with torch DDP and with ours; gradients and weights must be equal after every step."""
    kwargs = CASES[case].ddp
    assert kwargs is not None
    return _train_both(CASES[case], training, wrap=lambda model: DistributedDataParallel(model, **kwargs))


def parity_with_mean(case: str, training: Training) -> Outcome:
    """The same, against gradients averaged by hand: what torch DDP should do where it cannot."""
    return _train_both(CASES[case], training, synchronise=average_by_hand)


def parity_with_quantized_mean(case: str, training: Training) -> Outcome:
    """The same for gradients that travel as int8, against what that is defined to be, computed by hand."""
    return _train_both(CASES[case], training, synchronise=average_quantized_by_hand)


def assert_mean(
    model: nn.Module,
    reducer: Reducer,
    run: Callable[[Any, Callable[[], AbstractContextManager[None]], Callable[[], AbstractContextManager[None]]], None],
    *,
    tolerance: float = 0.0,
) -> None:
    """Call `run(module, backward, no_sync)` on the model and on a copy; gradients must be the mean of the copy's."""
    model.zero_grad()
    reference = copy.deepcopy(model)
    run(model, reducer.backward, reducer.no_sync)
    run(reference, nullcontext, nullcontext)
    average_by_hand(reference)
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), f"{name}: {param.grad}"
        if param.grad is not None and other.grad is not None:
            torch.testing.assert_close(param.grad, other.grad, rtol=tolerance, atol=tolerance / 100, msg=name)


def average_by_hand(model: nn.Module) -> None:
    """Mean over the ranks, with zeros where a rank has no gradient and nothing where none has."""
    for param in model.parameters():
        if param.requires_grad:
            gradient = torch.zeros_like(param) if param.grad is None else param.grad.to_dense()
            used = torch.tensor(float(param.grad is not None), device=device())
            sparse = param.grad is not None and param.grad.is_sparse
            real = torch.view_as_real(gradient) if gradient.is_complex() else gradient.contiguous()
            dist.all_reduce(real)
            dist.all_reduce(used)
            if used > 0:
                real /= dist.get_world_size()
                mean = torch.view_as_complex(real) if gradient.is_complex() else real
                param.grad = mean.to_sparse(1) if sparse else mean


def average_quantized_by_hand(model: nn.Module, *, is_sharded: bool = False) -> None:
    """The mean over the ranks of gradients rounded to 8 bits by blocks; sparse ones as they are.

    It is rounded once more if all of more than two ranks get it.
    """
    for param in model.parameters():
        if not param.requires_grad:
            continue
        is_sparse = param.grad is not None and param.grad.is_sparse
        gradient = torch.zeros_like(param) if param.grad is None else param.grad
        used = torch.tensor([float(param.grad is not None), float(is_sparse)], device=device())
        dist.all_reduce(used)
        if used[0] == 0:
            continue
        if used[1] > 0:
            dense = gradient.to_dense()
            dist.all_reduce(dense)
            param.grad = (dense / dist.get_world_size()).to_sparse(1)
            continue
        result = torch.empty_like(gradient)
        in_memory_order = gradient.as_strided((gradient.numel(),), (1,))
        real = torch.view_as_real(in_memory_order).view(-1) if gradient.is_complex() else in_memory_order
        integers, scales = _quantized(real)
        all_integers = [torch.empty_like(integers) for _ in range(dist.get_world_size())]
        all_scales = [torch.empty_like(scales) for _ in range(dist.get_world_size())]
        dist.all_gather(all_integers, integers)
        dist.all_gather(all_scales, scales)
        shares = [n * (s / dist.get_world_size()) for n, s in zip(all_integers, all_scales, strict=True)]
        mean = torch.stack(shares).sum(0)
        if dist.get_world_size() > 2 and not is_sharded:
            integers, scales = _quantized(mean.view(-1))
            mean = integers * scales
        flat = mean.view(-1)[: real.numel()].to(real.dtype)
        flat_result = result.as_strided((result.numel(),), (1,))
        flat_result.copy_(torch.view_as_complex(flat.view(-1, 2)) if gradient.is_complex() else flat)
        param.grad = result


def _quantized(numbers: Tensor) -> tuple[Tensor, Tensor]:
    blocks = nn.functional.pad(numbers, (0, -numbers.numel() % 256)).view(-1, 256)
    scales = blocks.abs().amax(1, keepdim=True).float().clamp(min=1e-30) * ((1 - 2**-22) / 127)
    return (blocks * (1 / scales)).round().to(torch.int8), scales


@dataclass(frozen=True)
class _Side:
    """A model in training: what stands around a backward that is not synchronised, around any, and after the last."""

    model: nn.Module
    accumulating: Callable[[], AbstractContextManager[None]]
    marked: Callable[[], AbstractContextManager[None]]
    synchronise: Callable[[nn.Module], None]


def _train_both(
    case: Case,
    training: Training,
    *,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    synchronise: Callable[[nn.Module], None] = lambda model: None,
) -> Outcome:
    """Train ours beside a reference that is wrapped, or whose gradients are synchronised after each backward."""
    torch.manual_seed(7 + dist.get_rank())  # the ranks start from different weights: rank 0's must win
    ours = case.build().to(device())
    torch.manual_seed(7)
    theirs = case.build().to(device())
    wrapped: Any = wrap(theirs)
    options: Any = {name: getattr(training, name) for name in ("bucket_cap_mb", "all_alone", "reduce_dtype")}
    reducer = build_reducer(ours, **options)
    with_buffers = SharedBuffers(ours, reducer.replicas, lambda: reducer.is_synchronised)
    our_side = _Side(with_buffers, reducer.no_sync, reducer.backward, lambda model: None)
    their_side = _Side(wrapped, getattr(wrapped, "no_sync", nullcontext), nullcontext, synchronise)
    our_optimizer, their_optimizer = _optimizer(training.optimizer, ours), _optimizer(training.optimizer, theirs)
    num_all_reduces = 0
    for step in range(training.steps):
        case.on_step(ours, step)
        case.on_step(theirs, step)
        with all_reduced() as reduced:
            _step(our_side, our_optimizer, case, training, step)
        num_all_reduces += len(reduced)
        _step(their_side, their_optimizer, case, training, step)
        assert_equal(ours, theirs, training.tolerance, step)
        assert_equal_on_all_ranks(ours)
    bucket_set = reducer.bucket_set
    assert bucket_set is not None
    reducer.close()
    return Outcome(reducer.stats, len(bucket_set.buckets), num_all_reduces)


def _step(side: _Side, optimizer: torch.optim.Optimizer, case: Case, training: Training, step: int) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        for micro_batch in range(training.micro_batches):
            last = micro_batch == training.micro_batches - 1
            with nullcontext() if last else side.accumulating():
                loss = case.loss(side.model, dist.get_rank(), step * training.micro_batches + micro_batch)
                with side.marked():
                    (loss / training.micro_batches).backward()
        side.synchronise(side.model)
        if training.clip == "norm":
            nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)
        elif training.clip == "value":
            nn.utils.clip_grad_value_(side.model.parameters(), 0.01)
        return loss

    if training.optimizer == "lbfgs":
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(params, lr=0.1),
        "momentum": lambda: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
        "adamw_fused": lambda: torch.optim.AdamW(params, lr=0.01, fused=True),
        "adamw_foreach": lambda: torch.optim.AdamW(params, lr=0.01, foreach=True),
        "lbfgs": lambda: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
    }
    return makers[name]()


def assert_equal(ours: nn.Module, theirs: nn.Module, tolerance: float, step: int) -> None:
    for (name, our_param), their_param in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        where = f"{name}, step {step}, rank {dist.get_rank()}"
        _assert_close(our_param.detach(), their_param.detach(), tolerance, f"weights of {where}")
        assert (our_param.grad is None) == (their_param.grad is None), f"gradient of {where}: {our_param.grad}"
        if our_param.grad is not None and their_param.grad is not None:
            assert our_param.grad.is_sparse == their_param.grad.is_sparse, where
            _assert_close(our_param.grad.to_dense(), their_param.grad.to_dense(), tolerance, f"gradient of {where}")


def _assert_close(ours: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    if tolerance == 0:
        assert torch.equal(ours, theirs), f"{what}: {(ours - theirs).abs().max()} apart"
    else:
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def assert_equal_on_all_ranks(model: nn.Module) -> None:
    """Every rank has the same weights, bit for bit."""
    for name, param in model.named_parameters():
        reference = param.detach().clone()
        dist.broadcast(torch.view_as_real(reference) if reference.is_complex() else reference, src=0)
        assert torch.equal(reference, param), f"{name} differs between rank 0 and rank {dist.get_rank()}"
