"""Collectives of a user's program inside a backward, in the group in which gradients are reduced, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.replicas import Replicas
from tests.support.cases import for_each
from tests.support.jobs.parity import assert_mean
from tests.support.ranks import RankFailed, device, run_on_ranks
from tests.support.scripts.trainers import like_torchrun, make_trainer

WIDTH = 8
ONE_WEIGHT_MB = 4 * WIDTH * WIDTH / 2**20
NUM_STEPS = 5


@contextmanager
def one_group() -> Iterator[None]:
    """Reduce gradients in the group that users have, on a host, too."""
    with patch.object(Collectives, "gradient_group", lambda self: self):
        yield


class SumOverRanks(torch.autograd.Function):
    """Adds up gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad


class Heads(nn.Module):
    """Two heads behind a collective. All weights, and so all buckets, are as large as what that one adds up.

    Ranks whose collectives meet in the wrong order then have wrong numbers; otherwise gloo would end the process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.always, self.sometimes = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor, *, communicates: bool, uses_both: bool) -> Tensor:
        hidden = self.trunk(x)
        hidden = SumOverRanks.apply(hidden) if communicates else hidden
        output: Tensor = self.always(hidden)
        return output + self.sometimes(output) if uses_both else output


def inputs(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(WIDTH, WIDTH, generator=generator).to(device())


def in_turns(step: int) -> bool:
    return (step + dist.get_rank()) % 2 == 0


def all_of_them(step: int) -> bool:
    return True


def train(
    *, uses_both: Callable[[int], bool], communicates_from: int, micro_batches: int = 1, **options: Any
) -> list[int]:
    """Return how many buckets have left before the end of each step's last backward; gradients must be the mean."""
    torch.manual_seed(0)
    model = Heads().to(device())
    launched = []
    with one_group():
        collectives = Collectives(device())
        reducer = Reducer(Replicas(model, collectives), ReducerConfig(bucket_cap_mb=ONE_WEIGHT_MB, **options))
        for step in range(NUM_STEPS):

            def run(module: nn.Module, backward: Any, no_sync: Any, step: int = step) -> None:
                for micro_batch in range(micro_batches):
                    is_last = micro_batch == micro_batches - 1
                    # Where there are several micro-batches: not in the last one.
                    communicates = step >= communicates_from and (micro_batches == 1 or not is_last)
                    loss = module(inputs(step), communicates=communicates, uses_both=uses_both(step)).square()
                    with nullcontext() if is_last else no_sync(), backward():
                        loss.mean().backward()
                        if is_last and reducer._backward is not None:
                            queue = reducer._backward.queue
                            launched.append(0 if queue is None else queue.next_to_launch)

            assert_mean(model, reducer, run)
        reducer.close()
        collectives.close_host_groups()
    return launched


@for_each(
    ("uses_both", "communicates_from", "options", "expected"),
    [
        # Ranks that use different parameters behind a collective meet in one order.
        (in_turns, 0, {}, [0, 0, 0, 0, 0]),
        (in_turns, 0, {"comm_hook": allreduce_hook}, [0, 0, 0, 0, 0]),
        (all_of_them, 2, {}, [0, 2, 2, 0, 0]),
        # A collective in a backward without synchronisation counts.
        (all_of_them, 2, {"micro_batches": 2}, [0, 2, 0, 0, 0]),
    ],
)
def test_buckets_wait_from_the_backward_after_the_first_collective(
    uses_both: Any, communicates_from: int, options: dict[str, Any], expected: list[int]
) -> None:
    how = {"uses_both": uses_both, "communicates_from": communicates_from, **options}
    assert run_on_ranks(train, **how)[0] == expected


def two_modules() -> list[int]:
    """Return how many buckets of the second module have left before the end of each backward."""
    torch.manual_seed(0)
    with one_group():
        models = [nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]).to(device()) for _ in range(2)]
        collectives = Collectives(device())
        config = ReducerConfig(bucket_cap_mb=ONE_WEIGHT_MB)
        first, second = (Reducer(Replicas(model, collectives), config) for model in models)
        launched = []
        for step in range(NUM_STEPS):
            loss = models[1](models[0](inputs(step))).square().mean()
            with first.backward(takes_part=False), second.backward(takes_part=False):
                loss.backward()
                assert second._backward is not None
                queue = second._backward.queue
                launched.append(0 if queue is None else queue.next_to_launch)
        for reducer in (first, second):
            reducer.close()
        collectives.close_host_groups()
    return launched


def test_reductions_of_another_module_are_ours() -> None:
    [launched, _] = run_on_ranks(two_modules)
    assert launched[0] == 0
    assert all(launched[1:])


class HeadsModule(LightningModule):
    """Rank 1 does not use all parameters in the step in which the program begins to communicate."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = Heads()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        is_third = batch_idx == 2
        uses_both = not (is_third and self.global_rank == 1)
        return self.heads(inputs(batch_idx), communicates=is_third, uses_both=uses_both).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@like_torchrun()
def fit() -> None:
    with one_group():
        strategy = BucketDDPStrategy(bucket_cap_mb=ONE_WEIGHT_MB)
        data: Any = DataLoader([torch.zeros(1)] * NUM_STEPS, batch_size=None)  # type: ignore[arg-type]
        make_trainer(strategy, max_epochs=1, use_distributed_sampler=False).fit(HeadsModule(), data)


def test_disorder_is_refused() -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_ranks(fit, grace_s=40)  # on a GPU it takes seconds to end what waits there
    [of_first, of_second] = str(failed.value).split("--- rank 1 ---")
    assert "RankFailedError: Rank 0 is stopping because another rank failed first.\nRank 1 " in of_first, of_first
    refusal = "RuntimeError: The program has begun to communicate inside a backward, and rank 1 does not use all"
    assert refusal in of_second, of_second
