"""Jobs in which hooks are left out, memory is given back, and gradients are foreseen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_bucketddp import LateGradientError
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import StepExchange
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.reducer import bucket, bucket_set, grad_hooks
from lightning_bucketddp.reducer.launch_queue import LaunchQueue
from lightning_bucketddp.reducer.observer import BackwardObserver
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.reducer.weighting import Weighting
from lightning_bucketddp.replicas.replicas import Replicas
from tests.support.jobs.models import WIDTH, batch, mlp
from tests.support.jobs.parity import average_by_hand, build_reducer
from tests.support.ranks import device


class Layers(nn.Module):
    """Layers that are used in the order, as often and in the way that a step says."""

    def __init__(self, num_layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: Tensor, order: list[int], *, reentrant: bool = False) -> Tensor:
        for index in order:
            x = torch.tanh(
                checkpoint(self.layers[index], x, use_reentrant=True) if reentrant else self.layers[index](x)
            )
        return x


def _assert_mean(model: nn.Module, reference: nn.Module, step: int) -> None:
    average_by_hand(reference)
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), f"{name}, step {step}: {param.grad}"
        if param.grad is not None and other.grad is not None:
            assert torch.equal(param.grad, other.grad), f"{name}, step {step}: {param.grad - other.grad}"


@dataclass(frozen=True)
class Watched:
    """Attributes:
    hooks: how many there are after each step.
    """

    num_buckets: int
    hooks: list[int]


def orders(orders_by_step: list[list[int]], *, micro_batches: int = 1) -> Watched:
    """Train with layers in these orders, in the last micro-batch; gradients must be the mean after every step."""
    torch.manual_seed(0)
    model = Layers().to(device())
    reducer = build_reducer(model, bucket_cap_mb=0.0006, all_are_marked=True)
    hooks = []
    for step, order in enumerate(orders_by_step):
        reference = copy.deepcopy(model)
        for each, mark in ((model, reducer.backward), (reference, torch.enable_grad)):
            each.zero_grad()
            for micro_batch in range(micro_batches):
                is_last = micro_batch == micro_batches - 1
                layers = order if is_last else sorted(order)
                loss = each(batch(dist.get_rank(), 10 * step + micro_batch), layers).square().mean()
                with nullcontext() if is_last else reducer.no_sync(), mark():
                    loss.backward()
        _assert_mean(model, reference, step)
        hooks.append(len(reducer._hooks._handles))
    assert reducer.bucket_set is not None
    num_buckets = len(reducer.bucket_set.buckets)
    reducer.close()
    return Watched(num_buckets, hooks)


def a_late_gradient() -> str:
    """Use the layer whose bucket leaves first once more, in the part whose backward comes last."""
    torch.manual_seed(0)
    model = Layers().to(device())
    reducer = build_reducer(model, bucket_cap_mb=0.0006, all_are_marked=True)
    said = ""
    for step in range(6):
        model.zero_grad()
        x = batch(dist.get_rank(), step).requires_grad_()
        if step == 5:  # one that is not watched
            x = checkpoint(model.layers[4], x, use_reentrant=True)
        loss = model(x, list(range(6)), reentrant=True).square().mean()
        try:
            with reducer.backward():
                loss.backward()
        except LateGradientError as error:
            assert step == 5
            said = str(error)
    reducer.close()
    return said


def other_backwards(kind: str) -> bool:
    """Whether hooks are still left out after a backward of some kind; its gradients must be the mean."""
    torch.manual_seed(0)
    model = mlp().to(device())
    with patch.object(grad_hooks, "_PATIENCE", 0 if kind == "unmarked" else 1000):
        reducer = build_reducer(model, bucket_cap_mb=0.001, all_are_marked=True)
    for step in range(8):
        reference = copy.deepcopy(model)
        is_other = step in (4, 5)
        for each in (model, reference):
            if not (is_other and kind == "added_up"):
                each.zero_grad(set_to_none=kind != "zeros")
            else:
                for param, other in zip(reference.parameters(), model.parameters(), strict=True):
                    if each is model:
                        param.grad = None if other.grad is None else other.grad.clone()
            loss = each(batch(dist.get_rank(), step)).square().mean()
            is_marked = each is model and not (is_other and kind == "unmarked")
            graph = is_other and kind == "create_graph"
            if is_marked:
                with reducer.backward():
                    loss.backward(create_graph=graph)
            else:
                loss.backward(create_graph=graph)
        if not (is_other and kind == "added_up"):
            _assert_mean(model, reference, step)
        for each in (model, reference):
            for param in each.parameters():
                if param.grad is not None and param.grad.requires_grad:
                    param.grad = None
    is_watching = reducer._hooks.is_watching
    reducer.close()
    return is_watching


def memory_is_given_back(kept: str) -> list[int]:
    """Bytes that the buckets hold when forwards begin. What somebody keeps of a gradient must stay as it is."""
    torch.manual_seed(0)
    model = mlp().to(device())
    with patch.object(bucket_set, "_GIVE_BACK_ON", (device().type,)), patch.object(bucket, "_GIVE_BACK_FROM_BYTES", 0):
        reducer = build_reducer(model, bucket_cap_mb=0.001)
        held: list[int] = []
        values: list[tuple[Tensor, Tensor]] = []
        for step in range(5):
            model.zero_grad()
            reducer.give_back_memory()
            if reducer.bucket_set is not None:
                buckets: Any = reducer.bucket_set.buckets
                held.append(sum(each._storage.nbytes() for each in buckets))
            reference = copy.deepcopy(model)
            for each in (model, reference):
                each(batch(dist.get_rank(), step)).square().mean().backward()
            _assert_mean(model, reference, step)
            gradient = next(model.parameters()).grad
            assert gradient is not None
            if kept != "nothing" and step == 0:
                values.append((gradient if kept == "gradient" else gradient.detach(), gradient.clone()))
            del gradient
        for tensor, value in values:
            assert kept == "alias" or torch.equal(tensor, value)
        reducer.close()
    return held


class _Launches(BackwardObserver):
    """How many buckets leave before each backward ends."""

    def __init__(self) -> None:
        self.before_end: list[int] = []

    def backward_began(self) -> None:
        self._num_launched = 0

    def bucket_launched(self, index: int) -> None:
        self._num_launched += 1

    def backward_ended(self) -> None:
        self.before_end.append(self._num_launched)


@dataclass(frozen=True)
class Unused:
    """By step: buckets that left before the backward ended, and how often flags were read from the device."""

    num_buckets: int
    before_end: list[int]
    flags_read: list[int]
    graph_was_right: bool | None


def unused_layers(left_out: Callable[[int, int], list[int]], *, reentrant: bool = False, lie: bool = False) -> Unused:
    """Leave out the layers that `left_out` says of a rank and a step; gradients must be the mean."""
    torch.manual_seed(0)
    model = Layers().to(device())
    collectives = Collectives(device())
    weighting = Weighting(StepExchange(collectives), by_weight=False, needs_every_weight=False)
    config = ReducerConfig(bucket_cap_mb=0.0006)
    with patch.object(grad_hooks, "_FIRST_COUNTED", 0):
        reducer = Reducer(Replicas(model, collectives), config, weighting=weighting, all_are_marked=True)
    reducer.observer = launches = _Launches()
    reads: list[int] = []
    original = LaunchQueue._attach_used_elsewhere

    def reading(queue: LaunchQueue) -> None:
        reads[-1] += 1
        original(queue)

    told = weighting.compare_missing

    def lying(*args: Any, **kwargs: Any) -> bool:
        return told(*args, **kwargs) or lie

    with (
        patch.object(LaunchQueue, "_attach_used_elsewhere", reading),
        patch.object(weighting, "compare_missing", lying),
    ):
        for step in range(8):
            reads.append(0)
            skipped = left_out(dist.get_rank(), step)
            order = [index for index in range(6) if index not in skipped]
            reference = copy.deepcopy(model)
            for each, mark in ((model, reducer.backward), (reference, torch.enable_grad)):
                each.zero_grad()
                x = batch(dist.get_rank(), step).requires_grad_()
                loss = each(x, order, reentrant=reentrant).square().mean()
                with mark():
                    loss.backward()
            _assert_mean(model, reference, step)
    assert reducer.bucket_set is not None
    outcome = Unused(len(reducer.bucket_set.buckets), launches.before_end, reads, reducer.bucket_set.graph_was_right)
    reducer.close()
    collectives.close_host_groups()
    return outcome


def one_for_all(rank: int, step: int) -> list[int]:
    return [1 + step % 4]


def one_each(rank: int, step: int) -> list[int]:
    return [1 + (step + rank) % 4]


def none(rank: int, step: int) -> list[int]:
    return []
