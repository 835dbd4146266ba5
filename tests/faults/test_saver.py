"""One rank saves for all when ranks have aborted: the lowest that comes, and never two."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.checkpoint.atomic_file import atomic_file, claim_file, find_temporary_files
from lightning_bucketddp.faults import side_channel
from lightning_bucketddp.faults.failure import Failure, Kind
from lightning_bucketddp.faults.side_channel import SaverElection, SideChannel
from tests.support.forks import PROCESSES
from tests.support.ranks import on_ranks
from tests.support.scripts.trainers import like_torchrun, lines_logged, make_trainer

RUN_ID = "0123456789abcdef"
WORLD_SIZE = 6
RANK_ZERO_DIED = Failure(rank=0, kind=Kind.DIED, what="it was killed")
RANK_FIVE_RAISED = Failure(rank=5, kind=Kind.RAISED, what="ValueError")


class Ranks:
    """The elections of all ranks of a run, whose store may die."""

    def __init__(self, directory: Path, *, name: str = "run") -> None:
        store = HashStore()
        of_all: dict[str, Any] = {"name": name, "world_size": WORLD_SIZE, "store_rank": 0}
        self._channels = [SideChannel(store, rank=rank, **of_all) for rank in range(WORLD_SIZE)]
        claim = partial(claim_file, str(directory))
        self._elections = [SaverElection(channel, claim_file=claim) for channel in self._channels]

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def lose_store(self) -> None:
        """Let no rank reach the store any more."""
        for channel in self._channels:
            channel.is_lost = True

    def check(self) -> None:
        """Do as their watchdogs do while the store lives."""
        for election in self._elections:
            election.check()

    def savers(self, *, come: list[int], failure: Failure) -> list[int]:
        """The ranks that find that they save, of those that come to their end at the same time."""
        with ThreadPoolExecutor(len(come)) as threads:
            won = threads.map(lambda rank: self._elections[rank].is_won(failure), come)
            return [rank for rank, is_won in zip(come, won, strict=True) if is_won]


@pytest.fixture
def make_ranks(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    with ExitStack() as stack:
        yield lambda name="run": stack.enter_context(closing(Ranks(tmp_path, name=name)))


def test_the_lowest_rank_that_lives_saves_and_one_whose_exception_ends_the_run_only_if_it_is_rank_zero(
    make_ranks: Callable[..., Ranks], tmp_path: Path
) -> None:
    assert make_ranks().savers(come=[5, 4, 3, 2, 1], failure=RANK_ZERO_DIED) == [1]
    assert make_ranks().savers(come=[4, 3, 2, 1, 0], failure=RANK_FIVE_RAISED) == [0]
    assert make_ranks().savers(come=[5], failure=RANK_FIVE_RAISED) == []
    rank_zero_raised = Failure(rank=0, kind=Kind.RAISED, what="ValueError")
    assert make_ranks().savers(come=[1, 0], failure=rank_zero_raised) == [0]
    assert not any(tmp_path.iterdir())


def test_one_saves_where_lower_ranks_do_not_come(
    monkeypatch: pytest.MonkeyPatch, make_ranks: Callable[..., Ranks]
) -> None:
    monkeypatch.setattr(side_channel, "_COMES_WITHIN_S", 0.3)
    ranks = make_ranks()
    # Rank 1 may be on the host of rank 0. All others believe that it is their turn.
    assert len(ranks.savers(come=[2, 3, 4, 5], failure=RANK_ZERO_DIED)) == 1
    # It was only late.
    assert ranks.savers(come=[1], failure=RANK_ZERO_DIED) == []


def test_one_saves_where_the_store_died_with_rank_zero(make_ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    ranks = make_ranks()
    ranks.lose_store()
    assert len(ranks.savers(come=[1, 2, 3, 4, 5], failure=RANK_ZERO_DIED)) == 1
    other_run = make_ranks(name="another run")
    other_run.lose_store()
    assert len(other_run.savers(come=[1, 2, 3, 4, 5], failure=RANK_ZERO_DIED)) == 1
    assert len(list(tmp_path.iterdir())) == 2  # a file of each run has decided, not the store


def test_one_saves_where_the_network_is_cut_in_two(make_ranks: Callable[..., Ranks]) -> None:
    ranks = make_ranks()
    here = ranks.savers(come=[0, 1, 2], failure=Failure(rank=3, kind=Kind.LOST, what="its host no longer answers"))
    ranks.lose_store()
    there = ranks.savers(come=[3, 4, 5], failure=Failure(rank=0, kind=Kind.LOST, what="its host no longer answers"))
    assert (here, there) == ([0], [])


def test_a_rank_that_is_late_does_not_save_again_when_rank_zero_has_saved_and_ended(
    make_ranks: Callable[..., Ranks],
) -> None:
    ranks = make_ranks()
    assert ranks.savers(come=[0], failure=RANK_FIVE_RAISED) == [0]
    ranks.check()
    ranks.lose_store()
    assert ranks.savers(come=[1, 2, 3, 4], failure=RANK_FIVE_RAISED) == []


def claim(directory: str) -> None:
    os._exit(0 if claim_file(directory, RUN_ID) else 3)


def test_one_process_makes_the_file_and_a_later_save_removes_it(tmp_path: Path) -> None:
    processes = [PROCESSES.Process(target=claim, args=(str(tmp_path),)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(process.exitcode or 0 for process in processes) == [0] + [3] * 7
    assert len(find_temporary_files(str(tmp_path))) == 1
    assert not claim_file(str(tmp_path), RUN_ID)
    assert claim_file(str(tmp_path), "f" * 16)
    with atomic_file(str(tmp_path / "model.ckpt")) as file:
        file.write(b"weights")
    # Not that of a process that lives: others of its run may still come.
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".bucketddp-saver-{'f' * 16}", "model.ckpt"]


@on_ranks()
@like_torchrun()
def test_the_log_names_the_last_checkpoint_when_one_is_not_saved(tmp_path: Path) -> None:
    """Save after a partial step, with three checkpoints before it; then again without the newest of them."""
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")
    options: dict[str, Any] = {"max_steps": 3, "limit_val_batches": 0, "enable_checkpointing": True}
    trainer = make_trainer("bucketddp", callbacks=checkpoints, **options)
    trainer.fit(BoringModel())
    assert isinstance(trainer.strategy, BucketDDPStrategy)
    trainer.strategy.has_partial_step = True
    there = []
    with lines_logged("lightning_bucketddp") as lines:
        for _ in range(2):
            trainer.save_checkpoint(tmp_path / "partial.ckpt")
            there.append(max(path.name for path in tmp_path.glob("*.ckpt")))
            dist.barrier()
            (tmp_path / there[-1]).unlink(missing_ok=True)
            dist.barrier()
    assert there == ["epoch=0-step=3.ckpt", "epoch=0-step=2.ckpt"]
    assert [line.partition("Resume from ")[2] for line in lines] == [
        f"`{tmp_path / name}`, the last that was saved." for name in there
    ]
