"""Resuming within an epoch, by many examples: Lightning's training loop in short, with its counters and fetchers."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.progress import _BatchProgress, _Progress
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_bucketddp.data.epoch_position import EpochPosition
from lightning_bucketddp.data.sharded_iterable import IterableSharding
from tests.support.scripts.evaluations import ByParity

NUM_EPOCHS = 2
HOOKS = ("training_step", "optimizer_step", "on_train_batch_end", "between batches")


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self._size = size

    def __getitem__(self, index: Any) -> Any:
        return index

    def __len__(self) -> int:
        return self._size


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self._size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._size))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self._size


class Pairs(BatchSampler):
    """One of a user's that makes batches as torch does."""


@dataclass(frozen=True)
class Job:
    """What is trained."""

    kind: str = "distributed"
    num_samples: int = 24
    shuffle: bool = True
    drop_last: bool = False
    limit: int | None = None
    accumulate: int = 1


@dataclass(frozen=True)
class Start:
    """A start of the program: on how many ranks, with which batches, and after how many it ends, in which hook."""

    num_ranks: int = 2
    batch_size: int = 2
    stop: int | None = None
    hook: str = HOOKS[0]


def make_loader(job: Job, start: Start, rank: int) -> Any:
    """As Lightning gives it to the strategy."""
    data = Numbers(job.num_samples)
    ranks: dict[str, Any] = {"num_replicas": start.num_ranks, "rank": rank}
    if job.kind.endswith("stream"):
        dataset = SizedStream(job.num_samples) if job.kind == "sized stream" else Stream(job.num_samples)
        return DataLoader(dataset, batch_size=start.batch_size, drop_last=job.drop_last)
    sampler: Any = DistributedSampler(data, shuffle=job.shuffle, seed=3, **ranks)
    if job.kind == "random":
        sampler = DistributedSamplerWrapper(RandomSampler(data), shuffle=False, **ranks)
    if job.kind == "of each rank":
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(rank))
    if job.kind == "single":
        return DataLoader(data, batch_size=None, sampler=sampler)
    if job.kind == "pairs":
        return DataLoader(data, batch_sampler=Pairs(sampler, start.batch_size, job.drop_last))
    if job.kind == "own batches":
        return DataLoader(data, batch_sampler=ByParity(SequentialSampler(data), start.batch_size, False))
    return DataLoader(data, batch_size=start.batch_size, sampler=sampler, drop_last=job.drop_last)


class Rank:
    """One rank of one start."""

    def __init__(self, job: Job, start: Start, rank: int) -> None:
        self.job, self.start = job, start
        self.seen: list[list[int]] = [[] for _ in range(NUM_EPOCHS)]
        self.num_batches = 0
        self.num_steps = 0
        self.is_over = False
        self._pending: list[int] = []
        self.batches: Any = _BatchProgress()
        self.epochs: Any = _Progress()
        trainer: Any = SimpleNamespace(
            state=SimpleNamespace(fn="fit"),
            world_size=start.num_ranks,
            global_rank=rank,
            accumulate_grad_batches=job.accumulate,
            max_steps=-1,
            callbacks=[],
            lightning_module=SimpleNamespace(automatic_optimization=True),
            lr_scheduler_configs=[],
            _logger_connector=SimpleNamespace(_callback_metrics={}),
            fit_loop=SimpleNamespace(
                epoch_progress=self.epochs,
                epoch_loop=SimpleNamespace(batch_progress=self.batches, _batches_that_stepped=0),
                _restarting=False,
            ),
        )
        self.trainer = trainer
        self.position = EpochPosition(is_on=True)
        self.position.begin(self.trainer)
        self.sharding = IterableSharding(rank=rank, world_size=start.num_ranks, warn=pytest.fail)

    def load(self, checkpoint: dict[str, Any]) -> None:
        self.position.take_from(checkpoint, self.trainer)
        loop = checkpoint["loops"]["fit_loop"]
        self.epochs.load_state_dict(loop["epoch_progress"])
        self.batches.load_state_dict(loop["epoch_loop.batch_progress"])
        optimizer = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
        self.num_steps = optimizer["step"]["total"]["completed"]

    def run(self, loader: Any, checkpoint: dict[str, Any] | None) -> None:
        self.position.begin_loaders()
        for part in (self.sharding, self.position):
            loader = part.prepare_loader(loader, is_training=True)
        self.loader = loader
        combined = CombinedLoader(loader, "max_size_cycle")
        self.trainer.fit_loop._combined_loader = combined
        length = len(loader) if self.job.kind != "stream" else math.inf
        if length == 0:  # Lightning trains nothing then
            raise UnsatisfiedAssumption
        combined.limits = [min(length, self.job.limit or math.inf)]
        current = self.epochs.current
        is_within = checkpoint is not None and not current.ready == current.started == current.processed
        self.trainer.fit_loop._restarting = is_within
        fetcher = _PrefetchDataFetcher()
        fetcher.setup(combined)
        self._set_epoch(current.processed)
        iter(fetcher)
        self.trainer.num_training_batches = len(combined) if self.job.kind != "stream" else math.inf
        self.position.begin_training()
        is_first = True
        while self.epochs.current.processed < NUM_EPOCHS and not self.is_over:
            self._run_epoch(fetcher, is_within=is_within and is_first, is_first=is_first)
            is_first = False

    def _set_epoch(self, epoch: int) -> None:
        samplers: tuple[Any, ...] = (self.loader.sampler, getattr(self.loader.batch_sampler, "sampler", None))
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def _run_epoch(self, fetcher: Any, *, is_within: bool, is_first: bool) -> None:
        progress, epoch = self.batches, self.epochs.current.processed
        self._set_epoch(epoch)
        if is_within:
            if progress.total.completed == progress.total.processed - 1:
                progress.increment_completed()
            progress.reset_on_restart()
        else:
            self.epochs.increment_ready()
            self.epochs.increment_started()
            progress.reset_on_run()
            if not is_first:
                iter(fetcher)
        fetcher.fetched += progress.current.ready
        total = self.trainer.num_training_batches
        while progress.current.ready != total and not progress.is_last_batch:
            try:
                batch = next(fetcher)[0]
            except StopIteration:
                # Otherwise Lightning would not notice in time: no validation, and no step with the last gradients.
                assert self.job.kind.endswith("stream"), "an epoch ends with a batch that is known to be its last"
                break
            progress.is_last_batch = fetcher.done
            self._train(batch, epoch)
            if self.is_over:
                return
        self.epochs.increment_processed()
        self.epochs.increment_completed()

    def _train(self, batch: Any, epoch: int) -> None:
        progress = self.batches
        progress.increment_ready()
        progress.increment_started()
        hook = self.start.hook if self.num_batches == self.start.stop else None
        self.num_batches += 1
        self.is_over = hook is not None
        if hook == "training_step":
            return
        self._pending += [int(index) for index in torch.as_tensor(batch).view(-1)]
        is_last = progress.is_last_batch or progress.current.ready == self.trainer.num_training_batches
        if progress.current.ready % self.trainer.accumulate_grad_batches == 0 or is_last:
            self.trainer.global_step = self.num_steps
            self.position.complete_step()
            self.seen[epoch] += self._pending
            self._pending = []
            if hook == "optimizer_step":
                return
            self.num_steps += 1
        progress.increment_processed()
        if hook != "on_train_batch_end":
            progress.increment_completed()

    def save(self) -> dict[str, Any]:
        progress = {"total": {"completed": self.num_steps}, "current": {"completed": self.num_steps}}
        saved: dict[str, Any] = {
            "loops": {
                "fit_loop": {
                    "epoch_progress": self.epochs.state_dict(),
                    "epoch_loop.batch_progress": self.batches.state_dict(),
                    "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": progress}},
                }
            },
            "bucketddp": {"position": self.position.state()},
        }
        return saved


def run_program(job: Job, starts: list[Start]) -> list[list[Rank]]:
    """All ranks of all starts, each of which resumes from what rank 0 of the one before has saved."""
    outcome: list[list[Rank]] = []
    saved: list[dict[str, Any]] = []
    for number, start in enumerate(starts):
        ranks = [Rank(job, start, rank) for rank in range(start.num_ranks)]
        generators = [one["bucketddp"]["position"]["generators"] for one in saved]
        for rank in ranks:
            torch.default_generator.manual_seed(7 + number)  # a restart draws other numbers; ranks draw the same
            checkpoint = None
            if saved:
                checkpoint = deepcopy(saved[0])
                checkpoint["bucketddp"]["position"]["generators"] = generators
                rank.load(checkpoint)
            with warnings.catch_warnings():
                rank.run(make_loader(job, start, rank.trainer.global_rank), checkpoint)
        outcome.append(ranks)
        assert len({rank.num_batches for rank in ranks}) == 1  # or they would wait for each other for ever
        saved = [rank.save() for rank in ranks]
        if not ranks[0].is_over:
            break
    return outcome


def trained(outcome: list[list[Rank]], epoch: int) -> Counter[int]:
    return Counter(number for ranks in outcome for rank in ranks for number in rank.seen[epoch])


def in_order(outcome: list[list[Rank]], epoch: int, rank: int) -> list[int]:
    return [number for ranks in outcome for number in ranks[rank].seen[epoch]]


KINDS = ("distributed", "random", "single", "pairs", "of each rank", "own batches", "stream", "sized stream")
# Orders that are drawn anew in an epoch that had not begun.
DRAWN = ("random", "of each rank")
STOPS = st.integers(0, 12)


@st.composite
def programs(draw: st.DrawFn, *, changes_ranks: bool, changes_batches: bool) -> tuple[Job, list[Start]]:
    kind = draw(st.sampled_from(KINDS))
    job = Job(
        kind=kind,
        num_samples=60 if kind.endswith("stream") else draw(st.integers(1, 40)),  # as many on each of up to 5 ranks
        shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        limit=None if kind == "stream" else draw(st.none() | st.integers(1, 8)),
        accumulate=draw(st.integers(1, 3)),
    )
    starts = [Start(draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(STOPS), draw(st.sampled_from(HOOKS)))]
    for _ in range(draw(st.integers(1, 2))):
        num_ranks = draw(st.integers(1, 5)) if changes_ranks else starts[0].num_ranks
        batch_size = draw(st.integers(1, 6)) if changes_batches else starts[0].batch_size
        starts.append(Start(num_ranks, batch_size, draw(STOPS), draw(st.sampled_from(HOOKS))))
    starts[-1] = Start(starts[-1].num_ranks, starts[-1].batch_size)
    return job, starts


@settings(max_examples=100, deadline=None)
@given(programs(changes_ranks=False, changes_batches=False))
def test_a_run_that_is_resumed_goes_on_with_the_next_sample(program: tuple[Job, list[Start]]) -> None:
    job, starts = program
    outcome = run_program(job, starts)
    [undisturbed] = run_program(job, starts[-1:])
    for epoch in range(NUM_EPOCHS):
        for rank, alone in enumerate(undisturbed):
            if job.kind not in DRAWN:
                assert in_order(outcome, epoch, rank) == alone.seen[epoch]
        ours, theirs = trained(outcome, epoch), trained([undisturbed], epoch)
        assert (ours.keys(), ours.total()) == (theirs.keys(), theirs.total()) or job.limit or job.drop_last


@settings(max_examples=100, deadline=None)
@given(programs(changes_ranks=False, changes_batches=True))
def test_another_batch_size_leaves_out_no_sample_and_repeats_none(program: tuple[Job, list[Start]]) -> None:
    job, starts = program
    outcome = run_program(job, starts)
    [whole] = run_program(replace(job, limit=None, drop_last=False), starts[-1:])
    for epoch in range(NUM_EPOCHS):
        for rank, alone in enumerate(whole):
            ours, order = in_order(outcome, epoch, rank), alone.seen[epoch]
            if job.kind not in DRAWN:
                assert any(set(ours) == set(order[:number]) for number in range(len(order) + 1))  # without gaps
            if job.limit is None:
                largest = max(start.batch_size for start in starts) if job.drop_last else 1
                assert len(ours) > len(order) - largest
            if job.limit is None and not job.drop_last and job.kind not in ("of each rank", "own batches"):
                assert len(ours) == len(order)
            elif job.kind != "own batches":
                assert len(ours) <= len(order) + sum(start.batch_size for start in starts[1:])


@settings(max_examples=100, deadline=None)
@given(programs(changes_ranks=True, changes_batches=True))
def test_another_number_of_ranks_leaves_out_no_sample(program: tuple[Job, list[Start]]) -> None:
    job, starts = program
    outcome = run_program(job, starts)
    if job.kind == "of each rank":
        return  # whose orders are gone with their ranks
    for epoch in range(NUM_EPOCHS):
        ours = trained(outcome, epoch)
        if job.limit is None and not job.drop_last:
            assert ours.keys() == set(range(job.num_samples))
            if job.kind != "own batches":
                # Each time fewer than there are ranks: what does not come out even, and what an epoch is padded with.
                padding = max(start.num_ranks for start in starts) - 1
                assert ours.total() - len(ours) <= padding + sum(start.num_ranks - 1 for start in starts[1:])
