"""`global_batch_size`: as many samples make a step on any number of ranks, and across a resume on another number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.data.global_batch_size import divide
from tests.support.cases import for_each
from tests.support.ranks import raised_by, run_on_ranks
from tests.support.scripts.trainers import like_torchrun, make_trainer, said_about, workers_allowed

WIDTH = 4


class Numbers(Dataset[Any]):
    """Samples that know their index."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.inputs[index].sin().sum(dim=0, keepdim=True), index

    def __len__(self) -> int:
        return len(self.inputs)


class Stream(IterableDataset[Any]):
    """The same, every n-th of them on each rank."""

    def __init__(self, num_samples: int) -> None:
        self._numbers = Numbers(num_samples)

    def __iter__(self) -> Iterator[Any]:
        return (self._numbers[index] for index in range(dist.get_rank(), len(self._numbers), dist.get_world_size()))


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def make_optimizer(net: nn.Module) -> Any:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def expected_weights(batches: list[list[int]], *, num_samples: int) -> list[Tensor]:
    """What one process comes to that makes a step of each of `batches`."""
    data, net = Numbers(num_samples), make_net()
    optimizer = make_optimizer(net)
    for batch in batches:
        inputs, targets, _ = zip(*(data[index] for index in batch), strict=True)
        optimizer.zero_grad()
        F.mse_loss(net(torch.stack(inputs)), torch.stack(targets)).backward()
        optimizer.step()
    return [param.detach() for param in net.parameters()]


class Module(LightningModule):
    def __init__(self, *, is_manual: bool = False, estimates: bool = False) -> None:
        super().__init__()
        self.net = make_net()
        self.automatic_optimization = not is_manual
        self.steps: dict[int, list[int]] = {}
        self.estimated: float | None = None
        self._estimates = estimates
        self.val_sizes: set[int] = set()

    def training_step(self, batch: Any) -> Tensor | None:
        inputs, targets, indices = batch
        self.steps.setdefault(self.trainer.global_step, []).extend(indices.tolist())
        loss = F.mse_loss(self.net(inputs), targets)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Any) -> None:
        self.val_sizes.add(len(batch[0]))

    def configure_optimizers(self) -> Any:
        if self._estimates:
            self.estimated = self.trainer.estimated_stepping_batches
        return make_optimizer(self.net)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and how."""

    size: int | None = 24
    num_samples: int = 60
    batch_size: int = 4
    drop_last: bool = False
    is_in_order: bool = False
    is_stream: bool = False
    is_manual: bool = False
    estimates: bool = False
    num_workers: int = 0
    limit_train_batches: int | None = None
    reload_every: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def steps(self, *, num_epochs: int = 2) -> list[list[int]]:
        """The samples of each step in one process. Lightning shuffles training data in any case."""
        assert self.size is not None
        steps = []
        for epoch in range(num_epochs):
            shuffles = not (self.is_stream or self.is_in_order)
            order: DistributedSampler[int] = DistributedSampler(range(self.num_samples), 1, 0, shuffle=shuffles)  # type: ignore[arg-type]
            order.set_epoch(epoch)
            indices = list(order)
            steps += [indices[first : first + self.size] for first in range(0, self.num_samples, self.size)]
        return [step for step in steps if len(step) == self.size or not self.drop_last]

    def loader(self) -> DataLoader[Any]:
        data = Stream(self.num_samples) if self.is_stream else Numbers(self.num_samples)
        return DataLoader(
            data,
            batch_size=self.batch_size,
            sampler=DistributedSampler(data, shuffle=False) if self.is_in_order else None,
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            multiprocessing_context="fork" if self.num_workers else None,
        )


@dataclass(frozen=True)
class Outcome:
    """What a rank saw, `steps`: its samples by the number of the step, `accumulated`: during the fit and after it."""

    weights: list[Tensor]
    steps: dict[int, list[int]]
    estimated: float | None
    batch_size: int
    accumulated: tuple[int, int]
    val_sizes: set[int]
    lines: list[str]


@like_torchrun()
def train(
    *,
    setting: Setting,
    save_to: Path | None = None,
    resume_from: Path | None = None,
    max_steps: int = -1,
) -> Outcome:
    """Train; save after each step, if that is wanted."""
    division = []

    def note(trainer: Any, _: LightningModule) -> None:
        division.extend([trainer.train_dataloader.batch_size, trainer.accumulate_grad_batches])

    callbacks: list[Callback] = [LambdaCallback(on_train_start=note)]
    if save_to is not None:
        callbacks.append(ModelCheckpoint(save_to, filename="{step}", save_top_k=-1, every_n_train_steps=1))
    trainer = make_trainer(
        BucketDDPStrategy(global_batch_size=setting.size, **setting.options),
        max_epochs=2,
        max_steps=max_steps,
        limit_train_batches=setting.limit_train_batches,
        num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=setting.reload_every,
        enable_checkpointing=save_to is not None,
        callbacks=callbacks,
    )
    module = Module(is_manual=setting.is_manual, estimates=setting.estimates)
    lines: list[str] = []
    with said_about("global batch", lines), workers_allowed():
        trainer.fit(module, setting.loader(), DataLoader(Numbers(8), batch_size=4), ckpt_path=resume_from)
    return Outcome(
        [param.detach() for param in module.net.parameters()],
        module.steps,
        module.estimated,
        division[0],
        (division[1], trainer.accumulate_grad_batches),
        module.val_sizes,
        lines,
    )


class OwnSampler(BatchSampler):
    pass


# What a training that cannot have a global batch size is given, beside `Setting`.
UNDIVIDED: dict[str, Callable[[], Any]] = {
    "own_sampler": lambda: DataLoader(Numbers(60), batch_sampler=OwnSampler(RandomSampler(range(60)), 4, False)),
    "several": lambda: [Setting().loader(), Setting().loader()],
}


@like_torchrun()
def refusal(*, setting: Setting, data: str | None = None, **options: Any) -> str:
    """What a fit raises that cannot have a global batch size."""
    strategy = BucketDDPStrategy(global_batch_size=setting.size)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=data != "own_sampler", **options)
    loader = setting.loader() if data is None else UNDIVIDED[data]()
    return raised_by(lambda: trainer.fit(Module(is_manual=setting.is_manual), loader))


def as_sets(steps: list[list[int]]) -> list[list[int]]:
    return [sorted(step) for step in steps]


def samples_of_steps(*runs: list[Outcome]) -> list[list[int]]:
    """The samples of all ranks in each step, sorted; of several runs, one after the other."""
    steps: dict[int, list[int]] = {}
    for ranks in runs:
        for number in sorted(ranks[0].steps):
            assert number not in steps
            steps[number] = sorted(index for rank in ranks for index in rank.steps[number])
    assert list(steps) == list(range(len(steps)))
    return list(steps.values())


def assert_weights(ranks: list[Outcome], expected: list[torch.Tensor]) -> None:
    for rank in ranks:
        for ours, theirs in zip(rank.weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


# --- The division


@for_each("num_ranks", [1, 2, 3, 4, 8])
@for_each("largest", [1, 5, 16, 1000])
@for_each("per_rank", [1, 7, 12, 60])
def test_the_fewest_batches_that_are_small_enough_make_a_step(num_ranks: int, largest: int, per_rank: int) -> None:
    division = divide(num_ranks * per_rank, num_ranks=num_ranks, largest=largest)
    assert division.batch_size * division.batches_per_step == per_rank
    assert division.batch_size <= largest
    fewer = range(1, division.batches_per_step)
    assert not [count for count in fewer if per_rank % count == 0 and per_rank // count <= largest]


def test_the_smallest_batch_that_the_ranks_can_share_is_named() -> None:
    with pytest.raises(ValueError, match=r"`global_batch_size` is 3, .* a multiple of 4, for example 4\.$"):
        divide(3, num_ranks=4, largest=100)


@for_each("size", [0, -8, 2.5, "96", True])
def test_a_size_that_is_no_number_of_samples_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="global_batch_size") as raised:
        BucketDDPStrategy(global_batch_size=size)
    assert str(raised.value) == f"`global_batch_size` must be a positive number of samples, got {size!r}."


# --- Training

# 24 samples in each step, and 12 in the last one of an epoch. Batches of four, so 6, 3 and 2 of them.
WHOLE = Setting(estimates=True)


@pytest.mark.parametrize(("world_size", "batch_size", "accumulated"), [(1, 4, 6), (2, 4, 3), (4, 3, 2)])
def test_training_equals_one_process_with_the_whole_batch(world_size: int, batch_size: int, accumulated: int) -> None:
    ranks = run_on_ranks(train, world_size=world_size, setting=WHOLE)
    assert samples_of_steps(ranks) == as_sets(WHOLE.steps())
    assert_weights(ranks, expected_weights(WHOLE.steps(), num_samples=60))
    for rank in ranks:
        assert (rank.batch_size, rank.accumulated) == (batch_size, (accumulated, 1))
        assert rank.estimated == 6
        assert rank.val_sizes == {2 if world_size == 4 else 4}
    where = f"each of {world_size} ranks" if world_size > 1 else "1 rank"
    of_ours = f"bucketddp: global batch of 24: {batch_size} samples on {where}, accumulated over {accumulated} batches"
    assert [rank.lines for rank in ranks] == [[of_ours], *[[]] * (world_size - 1)]


@pytest.mark.parametrize(
    "setting",
    [
        Setting(reload_every=1, num_workers=1),
        Setting(is_in_order=True, drop_last=True, num_samples=71),
        Setting(num_samples=48, is_manual=True, batch_size=12),
        Setting(is_stream=True, options={"gradient_weight": "batch_size"}),
    ],
    ids=["reloaded", "in_order", "manual", "stream"],
)
def test_all_kinds_of_data_can_be_divided(setting: Setting) -> None:
    ranks = run_on_ranks(train, setting=setting)
    assert samples_of_steps(ranks) == as_sets(setting.steps())
    assert_weights(ranks, expected_weights(setting.steps(), num_samples=setting.num_samples))


def test_a_limit_may_end_an_epoch_within_a_step() -> None:
    setting = Setting(limit_train_batches=5)
    ranks = run_on_ranks(train, setting=setting)
    [first, second, _] = setting.steps(num_epochs=1)
    assert samples_of_steps(ranks)[:2] == as_sets([first, second[:16]])
    assert [len(step) for step in samples_of_steps(ranks)] == [24, 16, 24, 16]
    assert_weights(ranks, expected_weights(samples_of_steps(ranks), num_samples=60))


class OwnPart(Sampler[int]):
    """Gives each rank samples in a row, as many as it is told."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes

    def __iter__(self) -> Iterator[int]:
        begin = sum(self._sizes[: dist.get_rank()])
        return iter(range(begin, begin + len(self)))

    def __len__(self) -> int:
        return self._sizes[dist.get_rank()]


class NothingInBatch(Module):
    """Has no loss in one batch on rank 1."""

    def __init__(self, index: int | None) -> None:
        super().__init__()
        self._index = index

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return None if batch_idx == self._index and self.global_rank == 1 else super().training_step(batch)


@like_torchrun()
def train_unequal(*, sizes: list[int], size: int, nothing_in: int | None = None) -> list[Tensor]:
    """Train on batches of at most two samples, as many samples in a row on each rank as it has."""
    strategy = BucketDDPStrategy(global_batch_size=size, uneven_data=True)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
    module = NothingInBatch(nothing_in)
    trainer.fit(module, DataLoader(Numbers(sum(sizes)), batch_size=2, sampler=OwnPart(sizes)))
    return [param.detach() for param in module.net.parameters()]


@pytest.mark.parametrize(
    ("how", "steps"),
    [
        # Rank 0 has no batch of its own in the last step, or one of two.
        ({"sizes": [4, 8], "size": 4}, [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9], [10, 11]]),
        ({"sizes": [6, 8], "size": 8}, [[0, 1, 2, 3, 6, 7, 8, 9], [4, 5, 10, 11, 12, 13]]),
        # The last step has one batch, which is nothing on rank 1.
        ({"sizes": [6, 6], "size": 8, "nothing_in": 2}, [[0, 1, 2, 3, 6, 7, 8, 9], [4, 5]]),
    ],
    ids=["ended", "ends_within", "skipped"],
)
def test_only_samples_that_a_rank_trains_on_count_in_a_step(how: dict[str, Any], steps: list[list[int]]) -> None:
    for weights in run_on_ranks(train_unequal, **how):
        expected = expected_weights(steps, num_samples=sum(how["sizes"]))
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


# --- Resuming


@pytest.mark.parametrize(
    ("setting", "stops_after"),
    [
        (Setting(num_samples=64, estimates=True), 2),
        (Setting(num_samples=60), 3),
    ],
    ids=["within_epoch", "end_of_epoch"],
)
def test_a_run_goes_on_after_the_same_steps_on_another_number_of_ranks(
    setting: Setting, stops_after: int, tmp_path: Path
) -> None:
    expected = setting.steps()
    runs = [run_on_ranks(train, world_size=2, setting=setting, max_steps=stops_after, save_to=tmp_path)]
    # From two ranks to four, then to one.
    steps = [stops_after, stops_after + 1, len(expected)]
    for world_size, (first, last) in zip((4, 1), pairwise(steps), strict=True):
        how: Any = {"max_steps": last, "save_to": tmp_path, "resume_from": tmp_path / f"step={first}.ckpt"}
        runs.append(run_on_ranks(train, world_size=world_size, setting=setting, **how))
    assert samples_of_steps(*runs) == as_sets(expected)
    assert_weights(runs[-1], expected_weights(expected, num_samples=setting.num_samples))


# --- What cannot be

NEEDED = "`global_batch_size` needs one training `DataLoader` that makes batches by its `batch_size`, and there is"
OF_BOTH = "`global_batch_size` says how many batches are accumulated, and so does `{}`. Leave one of them out."


@for_each(
    ("how", "text"),
    [
        ({"data": "own_sampler"}, f"{NEEDED} one with a `OwnSampler` of its own."),
        ({"data": "several"}, f"{NEEDED} several."),
        ({"accumulate_grad_batches": 2}, OF_BOTH.format("accumulate_grad_batches=2")),
        ({"callbacks": GradientAccumulationScheduler({0: 2})}, OF_BOTH.format("GradientAccumulationScheduler")),
        (
            {"setting": Setting(is_manual=True)},
            "With `global_batch_size=24` each of 2 ranks would accumulate 3 batches of 4 samples, but with manual"
            " optimization that is left to you. Give the `DataLoader` a `batch_size` of 12 or more.",
        ),
        (
            {"setting": Setting(size=25)},
            "`global_batch_size` is 25, which 2 ranks cannot share evenly. Choose a multiple of 2, for example 24 or"
            " 26.",
        ),
    ],
)
def test_what_has_no_global_batch_is_refused_before_training(how: dict[str, Any], text: str) -> None:
    assert run_on_ranks(refusal, **{"setting": Setting(), **how}) == [f"ValueError: {text}"] * 2
