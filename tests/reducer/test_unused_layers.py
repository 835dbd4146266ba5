"""Layers that are left out, gradients that come in another order, and memory that is given back: with real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import StepExchange, Weighting
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.reducer import bucket, bucket_set
from lightning_bucketddp.reducer.launch_queue import LaunchQueue
from lightning_bucketddp.reducer.observer import BackwardObserver
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.replicas import Replicas
from tests.support.cases import for_each
from tests.support.jobs.models import WIDTH, batch, mlp
from tests.support.jobs.parity import assert_mean, build_reducer
from tests.support.ranks import device, run_on_ranks


class Layers(nn.Module):
    """Layers that are used in a given order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def differentiate(model: nn.Module, reducer: Reducer, step: int, *order: list[int]) -> None:
    """Give `model` the gradients of this rank's batch; they must be the mean over the ranks."""

    def run(module: nn.Module, backward: Any, no_sync: Any) -> None:
        loss = module(batch(dist.get_rank(), step).requires_grad_(), *order).square().mean()
        with backward():
            loss.backward()

    assert_mean(model, reducer, run)


def memory_is_given_back(kept: str) -> list[int]:
    """Bytes that the buckets hold when forwards begin. What somebody keeps of a gradient must stay as it is."""
    torch.manual_seed(0)
    model = mlp().to(device())
    with (
        patch.object(bucket_set, "_GIVE_BACK_ON", (device().type,)),
        patch.object(bucket, "_GIVE_BACK_FROM_BYTES", 0),
        # As on a GPU: gloo's other groups hold tensors a moment longer.
        patch.object(Collectives, "gradient_group", lambda self: self),
    ):
        reducer = build_reducer(model, bucket_cap_mb=0.001)
        held: list[int] = []
        values: list[tuple[Tensor, Tensor]] = []
        for step in range(5):
            model.zero_grad()
            reducer.give_back_memory()
            if reducer.bucket_set is not None:
                buckets: Any = reducer.bucket_set.buckets
                held.append(sum(each._storage.nbytes() for each in buckets))
            differentiate(model, reducer, step)
            gradient = next(model.parameters()).grad
            assert gradient is not None
            if kept != "nothing" and step == 0:
                values.append((gradient if kept == "gradient" else gradient.detach(), gradient.clone()))
            del gradient
        for tensor, value in values:
            assert torch.equal(tensor, value)
        reducer.close()
    return held


def flags_read(left_out: Callable[[int, int], list[int]]) -> list[int]:
    """Leave out the layers that `left_out` returns for a rank and a step; gradients must be the mean.

    Returns how often flags were read from the device until each step.
    """
    torch.manual_seed(0)
    model = Layers().to(device())
    collectives = Collectives(device())
    weighting = Weighting(StepExchange(collectives), by_weight=False)
    config = ReducerConfig(bucket_cap_mb=0.0006)
    reducer = Reducer(Replicas(model, collectives), config, weighting=weighting)
    reads: list[int] = []
    original = LaunchQueue._attach_used_elsewhere
    with patch.object(LaunchQueue, "_attach_used_elsewhere", autospec=True, side_effect=original) as reading:
        for step in range(8):
            skipped = left_out(dist.get_rank(), step)
            differentiate(model, reducer, step, [index for index in range(6) if index not in skipped])
            reads.append(reading.call_count)
    reducer.close()
    collectives.close_host_groups()
    return reads


def one_for_all(rank: int, step: int) -> list[int]:
    return [1 + step % 4]


def one_each(rank: int, step: int) -> list[int]:
    return [1 + (step + rank) % 4]


def none(rank: int, step: int) -> list[int]:
    return []


@pytest.mark.parametrize("kept", ["nothing", "gradient", "alias"])
def test_memory_of_gradients_is_given_back_unless_one_is_kept(kept: str) -> None:
    for held in run_on_ranks(memory_is_given_back, kept=kept):
        assert held == [0] * 4 if kept == "nothing" else held[0] > 0


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [(one_for_all, [1] + [2] * 7), (one_each, list(range(1, 9))), (none, [0] * 8)],
)
def test_flags_are_read_where_ranks_miss_different_layers(left_out: Any, expected: list[int]) -> None:
    assert run_on_ranks(flags_read, left_out=left_out) == [expected] * 2


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


def launched_before_end(*, moves: bool = False, overlap: bool = True) -> tuple[int, list[int]]:
    """Train in one order, then in another one; or move the module in mid-training."""
    torch.manual_seed(0)
    model = Layers().to(device())
    reducer = build_reducer(model, bucket_cap_mb=0.0006, overlap=overlap)
    reducer.observer = launches = _Launches()
    for step in range(6):
        order = list(range(6)) if step < 3 or moves else list(reversed(range(6)))
        if moves and step == 3:
            for param in model.parameters():
                param.data = param.data.double()
                param.data = param.data.float()
        differentiate(model, reducer, step, order)
    assert reducer.bucket_set is not None
    num_buckets = len(reducer.bucket_set.buckets)
    reducer.close()
    return num_buckets, launches.before_end


@for_each("how", [{}, {"moves": True}, {"overlap": False}])
def test_all_buckets_but_the_last_leave_before_the_end_unless_overlap_is_off(how: dict[str, Any]) -> None:
    """In any order, and after a move of the module."""
    for num_buckets, before_end in run_on_ranks(launched_before_end, **how):
        assert num_buckets > 2
        assert before_end == [0, *[num_buckets - 1 if how.get("overlap", True) else 0] * 5]
