"""Streams that are dealt out by rank and worker: every sample once, and read on where a run was interrupted."""

from __future__ import annotations

import itertools
import os
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.utils.data
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import CombinedMessages, StepExchange
from lightning_bucketddp.data.sharded_iterable import IterableSharding, ShardedIterable
from lightning_bucketddp.data.uneven_data import UnevenData
from lightning_bucketddp.strategies.fit_state import LoaderPreparation
from tests.support.cases import for_each
from tests.support.ranks import on_ranks, raised_by, run_on_ranks
from tests.support.scripts.trainers import like_torchrun, make_trainer, workers_allowed


class Numbers(IterableDataset[Tensor]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(number)]) for number in range(self.num_samples))


class SizedNumbers(Numbers):
    def __len__(self) -> int:
        return self.num_samples


@dataclass(frozen=True)
class Stream:
    """What a job trains on, and how."""

    num_samples: int = 22
    is_sized: bool = False
    num_workers: int = 0
    batch_size: int = 2
    persistent: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)

    def loader(self, num_samples: int | None = None) -> DataLoader[Tensor]:
        cls = SizedNumbers if self.is_sized else Numbers
        return DataLoader(
            cls(num_samples or self.num_samples),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.persistent,
            # The start method of the processes that run jobs.
            multiprocessing_context="fork" if self.num_workers else None,
        )


class Reader(LightningModule):
    """Writes down the numbers of each batch, by stage; batches that only keep other ranks company are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: dict[str, list[list[int]]] = {"train": [], "val": [], "test": [], "predict": []}

    def training_step(self, batch: Tensor) -> Tensor:
        strategy: Any = self.trainer.strategy
        if not strategy._state.weighting.is_idle:
            self._see("train", batch)
        return self.layer(batch / 100).square().mean()

    def validation_step(self, batch: Tensor) -> None:
        self._see("val", batch)

    def test_step(self, batch: Tensor) -> None:
        self._see("test", batch)

    def predict_step(self, batch: Tensor) -> None:
        self._see("predict", batch)

    def _see(self, stage: str, batch: Tensor) -> None:
        self.seen[stage].append([int(number) for number in batch.flatten().tolist()])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _make_trainer(stream: Stream, **options: Any) -> Trainer:
    strategy = BucketDDPStrategy(**{"shard_iterable": True, **stream.options})
    return make_trainer(strategy, num_sanity_val_steps=0, **{"max_epochs": 2, **stream.trainer, **options})


@like_torchrun()
@workers_allowed()
def read(*, stream: Stream) -> tuple[dict[str, list[list[int]]], str, list[str]]:
    """Fit, test and predict; return the batches by stage, the class of the training loader, and our warnings."""
    module, trainer = Reader(), _make_trainer(stream)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, stream.loader(), stream.loader(7))
        loader_type = type(trainer.train_dataloader).__name__
        trainer.test(module, stream.loader(8), verbose=False)
        trainer.predict(module, stream.loader(9))
    return module.seen, loader_type, [str(one.message) for one in caught if "bucketddp" in str(one.message)]


@like_torchrun()
@workers_allowed()
def resume(*, stream: Stream, directory: Path, step: int, after_validation: bool = False) -> Any:
    """Train in one run and in two; return the batches of the one, and those until step `step` and after it."""
    uninterrupted = Reader()
    _make_trainer(stream).fit(uninterrupted, stream.loader())

    before = Reader()
    saves: dict[str, Any] = {"save_on_train_epoch_end": False} if after_validation else {"every_n_train_steps": step}
    checkpoint = ModelCheckpoint(directory, save_top_k=-1, filename="{step}", **saves)
    validates = {"val_check_interval": step, "check_val_every_n_epoch": None} if after_validation else {}
    trainer = _make_trainer(stream, enable_checkpointing=True, callbacks=checkpoint, max_steps=step, **validates)
    validation = replace(stream, is_sized=True)  # old versions of Lightning cannot resume where it has no length
    trainer.fit(before, stream.loader(), validation.loader(4))

    after = Reader()
    trainer = _make_trainer(stream)
    trainer.fit(after, stream.loader(), validation.loader(4), ckpt_path=directory / f"step={step}.ckpt")
    return uninterrupted.seen["train"], before.seen["train"], after.seen["train"]


SIZES = [0, 1, 3, 8, 23, 48]
BATCH_SIZES = [None, 1, 3, 8]

T = TypeVar("T")


def deal(loader: Any, *, rank: int = 0, world_size: int = 2, warnings: list[str] | None = None) -> Any:
    said = [] if warnings is None else warnings
    sharding = IterableSharding(rank=rank, world_size=world_size, warn=said.append)
    return sharding.prepare_loader(loader, is_training=True)


def numbers_in(batches: Iterator[Tensor]) -> list[list[int]]:
    return [batch.flatten().int().tolist() for batch in batches]


def batches_of(samples: list[T], size: int) -> list[list[T]]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]


# --- Every sample once


@pytest.mark.parametrize(("num_workers", "world_size"), [(0, 2), (0, 3), (1, 4), (2, 3)])
def test_each_sample_is_read_once_in_the_same_batches_by_any_number_of_workers(
    num_workers: int, world_size: int
) -> None:
    cases = list(itertools.product(SIZES, BATCH_SIZES, [False, True]))
    # Workers are processes: not all cases with all numbers of them.
    for num_samples, batch_size, drop_last in cases if num_workers == 0 else cases[num_workers + world_size :: 11]:
        drop_last = drop_last and batch_size is not None
        seen: list[int] = []
        for rank in range(world_size):
            loader = DataLoader(
                SizedNumbers(num_samples), batch_size=batch_size, drop_last=drop_last, num_workers=num_workers
            )
            dealt = deal(loader, rank=rank, world_size=world_size)
            batches = numbers_in(iter(dealt))
            expected = batches_of(list(range(rank, num_samples, world_size)), batch_size or 1)
            if drop_last:
                expected = [batch for batch in expected if len(batch) == batch_size]
            assert batches == expected
            assert len(dealt) == len(batches)
            seen += itertools.chain(*batches)
        if not drop_last:
            assert sorted(seen) == list(range(num_samples))


def test_workers_may_be_spawned() -> None:
    dealt = ShardedIterable(Numbers(10), rank=1, world_size=2, batch_size=2)
    dealt.num_read = 4
    copied = pickle.loads(pickle.dumps(dealt))
    assert numbers_in(iter(copied)) == [[5], [7], [9]]


def test_a_loader_keeps_its_class_and_its_dataset_is_still_reached() -> None:
    class OwnLoader(DataLoader[Tensor]):
        color = "red"
        owner: str

    loader = OwnLoader(Numbers(10), batch_size=2)
    loader.owner = "user"
    dealt = deal(loader)
    assert isinstance(dealt, OwnLoader)
    assert (type(dealt).__name__, dealt.color, dealt.owner, dealt.batch_size) == ("OwnLoader", "red", "user", 2)
    dataset: Any = dealt.dataset
    assert dataset.num_samples == 10
    assert not hasattr(dealt.dataset, "missing")
    # What the user has is as before.
    assert type(loader) is OwnLoader
    assert numbers_in(iter(loader))[0] == [0, 1]


def test_a_loader_that_was_dealt_is_not_dealt_twice() -> None:
    loaders: Any = LoaderPreparation()
    dealt = DataLoader(Numbers(10), batch_size=None)
    for rank in range(2):
        dealt = loaders.prepare(dealt, [IterableSharding(rank=rank, world_size=2, warn=pytest.fail)])
    # As for an evaluation: rank 1 repeats the batches 8 and 9 of rank 0.
    assert numbers_in(iter(dealt)) == [[1], [3], [5], [7], [8], [9]]


def test_workers_from_before_are_not_kept() -> None:
    loader = DataLoader(Numbers(8), batch_size=2, num_workers=1, persistent_workers=True)
    assert numbers_in(iter(loader)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert numbers_in(iter(deal(loader))) == [[0, 2], [4, 6]]


@for_each("loader", [DataLoader(TensorDataset(torch.arange(3))), [1, 2, 3]])
def test_other_data_is_left_alone(loader: Any) -> None:
    assert deal(loader) is loader


def test_a_stream_without_a_length_has_none() -> None:
    with pytest.raises(TypeError, match="has no len"):
        len(deal(DataLoader(Numbers(3))))


# --- Datasets that take their part by themselves


class ByWorker(Numbers):
    def __iter__(self) -> Iterator[Tensor]:
        return itertools.islice(super().__iter__(), *self._part())

    def _part(self) -> tuple[int, None, int]:
        worker = get_worker_info()
        return (0, None, 1) if worker is None else (worker.id, None, worker.num_workers)


class ByRank(Numbers):
    def __iter__(self) -> Iterator[Tensor]:
        return (sample for number, sample in enumerate(super().__iter__()) if number % 2 == own_rank())


def own_rank() -> int:
    return dist.get_rank()


class Inherited(ByRank):
    def __iter__(self) -> Iterator[Tensor]:
        yield from super().__iter__()


class ByArgument(Numbers):
    rank, world_size = 0, 2

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.islice(super().__iter__(), self.rank, None, self.world_size)


class ByVariable(Numbers):
    def __iter__(self) -> Iterator[Tensor]:
        return itertools.islice(super().__iter__(), int(os.environ.get("RANK", 0)), None, 2)


def set_part(_: int) -> None:
    worker: Any = get_worker_info()
    worker.dataset.num_samples //= worker.num_workers


class AsksElsewhere(Numbers):
    def describe(self) -> str:
        return f"rank {dist.get_rank()}"


@for_each(
    ("dataset", "options", "names"),
    [
        (ByWorker(8), {"num_workers": 2}, "`get_worker_info`"),
        (ByRank(8), {}, "`get_rank`"),
        (Inherited(8), {}, "`get_rank`"),
        (ByArgument(8), {}, "`world_size`"),
        (ByVariable(8), {}, "`RANK`"),
        (ChainDataset([Numbers(8), ByRank(8)]), {}, "`get_rank`"),
        (Numbers(8), {"num_workers": 2, "worker_init_fn": set_part}, "`get_worker_info`"),
    ],
)
def test_a_dataset_that_asks_for_its_part_is_named(dataset: Any, options: dict[str, Any], names: str) -> None:
    said: list[str] = []
    deal(DataLoader(dataset, **options), warnings=said)
    assert said == [
        f"bucketddp: `{type(dataset).__name__}` asks by {names} which samples to read, and `shard_iterable=True` deals"
        " out what it reads. If it takes a part of the samples by itself, the rest is never used: let it read all of"
        " them, or leave `shard_iterable` out."
    ]


@for_each("dataset", [Numbers(8), ByWorker(8), AsksElsewhere(8)])
def test_nothing_is_said_of_a_dataset_that_reads_everything(dataset: Any) -> None:
    said: list[str] = []
    assert isinstance(deal(DataLoader(dataset), warnings=said).dataset, ShardedIterable)
    assert said == []


def test_a_warning_comes_once_however_often_loaders_are_made() -> None:
    said: list[str] = []
    sharding = IterableSharding(rank=0, world_size=2, warn=said.append)
    for _ in range(3):
        sharding.prepare_loader(DataLoader(ByRank(8)), is_training=False)
    assert len(said) == 1


class SplitByNode(Numbers):
    """As Hugging Face's `split_by_node` leaves a dataset."""

    _distributed = (0, 2)


def test_a_dataset_that_is_dealt_already_is_left_as_it_is() -> None:
    said: list[str] = []
    pipe = IterableWrapper(range(8)).sharding_filter()
    for dataset in (pipe, SplitByNode(8)):
        loader: DataLoader[Any] = DataLoader(dataset)
        assert deal(loader, warnings=said) is loader
    assert said == [
        "bucketddp: `shard_iterable=True` leaves a dataset as it is: `DataLoader` itself deals out an `IterDataPipe`,"
        " at its `sharding_filter`. One that has none is read in full by every rank.",
        "bucketddp: `shard_iterable=True` leaves a dataset as it is: `split_by_node` has given each rank its part of"
        " this `SplitByNode`.",
    ]


# --- With a Trainer


@pytest.mark.parametrize(("num_workers", "is_sized"), [(0, True), (2, False)])
def test_a_trainer_reads_each_sample_once(num_workers: int, is_sized: bool) -> None:
    stream = Stream(21, is_sized=is_sized, num_workers=num_workers, options={"uneven_data": True})
    for number, (seen, loader_type, warned) in enumerate(run_on_ranks(read, stream=stream)):
        for stage, num_samples, num_passes in (("train", 21, 2), ("val", 7, 2), ("test", 8, 1), ("predict", 9, 1)):
            own = batches_of(list(range(number, num_samples, 2)), 2)
            if stage != "train":  # whole batches, of which rank 1 repeats some
                *others, last = batches_of(list(range(num_samples)), 2)
                rounds = [*batches_of(others, 2), [last]]
                own = [of_round[min(number, len(of_round) - 1)] for of_round in rounds]
            assert seen[stage] == own * num_passes
        assert (loader_type, warned) == ("DataLoader", [])


def test_a_stream_is_read_as_it_is_by_default() -> None:
    for seen, *_ in run_on_ranks(read, stream=Stream(22, options={"shard_iterable": False})):
        assert seen["train"] == batches_of(list(range(22)), 2) * 2


@for_each("is_sized", [False, True])
@on_ranks()
def test_an_uneven_end_is_explained(is_sized: bool) -> None:
    error = raised_by(lambda: read(stream=Stream(21, is_sized=is_sized)))
    # The whole text is tested where data is uneven for other reasons.
    assert error.startswith("OutOfStepError: Rank 1 has no more data in epoch 0, while rank 0 goes on after 5 batches.")


# --- Reading on


@pytest.mark.parametrize(
    ("stream", "how"),
    [
        # 24 samples are 6 batches per rank and epoch.
        (Stream(24, True, 2, persistent=True, trainer={"max_epochs": 3}), {"step": 2}),
        (Stream(24, is_sized=True), {"step": 8}),
        (Stream(24), {"step": 3, "after_validation": True}),
        # at the end of an epoch
        (Stream(24), {"step": 6}),
        (Stream(24, trainer={"limit_train_batches": 4}), {"step": 4}),
        # rank 1 has only 5 batches
        (Stream(21, is_sized=True, options={"uneven_data": True}), {"step": 3}),
    ],
    ids=str,
)
def test_a_run_that_is_resumed_reads_on(stream: Stream, how: dict[str, Any], tmp_path: Path) -> None:
    for uninterrupted, before, after in run_on_ranks(resume, stream=stream, directory=tmp_path, **how):
        assert before + after == uninterrupted
        assert before
        assert after


@on_ranks()
def test_the_end_of_a_stream_that_was_read_on_is_told_in_time() -> None:
    exchange = StepExchange(Collectives(torch.device("cpu")))
    loader = deal(DataLoader(SizedNumbers(12), batch_size=2), rank=dist.get_rank())
    loader.dataset.num_read, loader.num_batches_read = 4, 1  # a batch of each rank
    watched = UnevenData(exchange, extends=False).prepare(loader, is_only_loader=lambda _: True)
    batches = iter(watched)
    for _ in range(len(watched) - 1):
        assert exchange.receive() == CombinedMessages()  # nothing yet
        next(batches)
    told = exchange.receive()
    assert [told.least.kind.name, told.greatest.kind.name] == ["OUT_OF_DATA"] * 2
