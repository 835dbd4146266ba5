"""All ranks resume from the same checkpoint, or none does and every rank raises the reason."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPCheckpointIO
from tests.support.ranks import on_ranks, raised_by, run_on_ranks
from tests.support.scripts import models
from tests.support.scripts.fabrics import make_fabric
from tests.support.scripts.trainers import like_torchrun, make_trainer


@like_torchrun()
def resume(*, directory: Path, ckpt_path: str = "last", function: str = "fit") -> tuple[str, int]:
    """What a Trainer raises that resumes in `directory/<rank>`, from `last` or a file, and how many steps it does."""
    own = directory / str(dist.get_rank())
    last = ModelCheckpoint(own, save_last=True)
    trainer = make_trainer("bucketddp", max_epochs=2, enable_checkpointing=True, callbacks=last)
    path = "last" if ckpt_path == "last" else own / ckpt_path
    run = getattr(trainer, function)
    return raised_by(lambda: run(models.Regression(), models.loader(), ckpt_path=path)), trainer.global_step


@like_torchrun()
def load_with_fabric(*, directory: Path) -> tuple[str, float]:
    """What Fabric raises for `directory/<rank>/model.ckpt`, and what the weight is then, which was zero before."""
    fabric = make_fabric("bucketddp")
    module = fabric.setup(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.zeros_(module.weight)
    path = directory / str(dist.get_rank()) / "model.ckpt"
    return raised_by(lambda: fabric.load(path, {"module": module})), module.weight.item()


REMEDY = "Save where all hosts can read, or copy"


@like_torchrun()
def save_after_each_epoch(*, directory: Path) -> None:
    for epochs in (1, 2):
        trainer = make_trainer("bucketddp", max_epochs=epochs)
        trainer.fit(models.Regression(), models.loader())
        trainer.save_checkpoint(directory / f"{epochs}.ckpt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with checkpoints of one epoch and of two."""
    directory = tmp_path_factory.mktemp("saved")
    run_on_ranks(save_after_each_epoch, directory=directory)
    return directory


@pytest.fixture
def own(saved: Path, tmp_path: Path) -> Path:
    """A directory for each rank, with the first checkpoint as the last one."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        shutil.copy(saved / "1.ckpt", tmp_path / str(rank) / "last.ckpt")
    return tmp_path


def test_equal_files_of_several_hosts_are_one_checkpoint(own: Path) -> None:
    assert run_on_ranks(resume, directory=own) == [("", 20)] * 2


@pytest.mark.parametrize(("damaged", "function"), [(0, "test"), (1, "fit")])
def test_damage_on_one_rank_is_raised_on_every_rank(damaged: int, function: str, own: Path) -> None:
    path = own / str(damaged) / "last.ckpt"
    path.write_bytes(path.read_bytes()[:-1000])
    ranks = run_on_ranks(resume, directory=own, function=function)
    text = f"CheckpointReadError: Cannot read checkpoint `{path}`: it is cut short or damaged ("
    assert all(raised.startswith(text) for raised, _ in ranks)
    assert [raised.endswith(f" (on rank {damaged})") for raised, _ in ranks] == [damaged != 0, damaged != 1]
    assert [steps for _, steps in ranks] == [0, 0]


def test_different_files_are_refused(own: Path, saved: Path) -> None:
    shutil.copy(saved / "2.ckpt", own / "1" / "last.ckpt")
    text = (
        f"CheckpointReadError: The checkpoint `{own}/0/last.ckpt` of rank 0 is another one than `{own}/1/last.ckpt` of"
        f" rank 1: the files differ. {REMEDY} one file to every host."
    )
    assert run_on_ranks(resume, directory=own) == [(text, 0)] * 2


def test_a_checkpoint_that_only_one_rank_finds_is_refused(own: Path) -> None:
    (own / "1" / "last.ckpt").unlink()
    text = (
        f"CheckpointReadError: There is a checkpoint `{own}/0/last.ckpt` to resume from, but not on rank 1."
        f" {REMEDY} it to every host."
    )
    # Lightning finds none there, and would start afresh.
    assert run_on_ranks(resume, directory=own) == [(text, 0)] * 2


def test_a_path_that_only_one_rank_has_is_refused(own: Path) -> None:
    (own / "1" / "last.ckpt").unlink()
    rank_zero, rank_one = run_on_ranks(resume, directory=own, ckpt_path="last.ckpt")
    cause = f"FileNotFoundError: Checkpoint file not found: {own}/1/last.ckpt"
    assert rank_zero == (f"CheckpointReadError: Cannot read checkpoint `{own}/1/last.ckpt`: {cause} (on rank 1)", 0)
    assert rank_one == (cause, 0)


def test_without_a_checkpoint_every_rank_starts_afresh(tmp_path: Path) -> None:
    assert run_on_ranks(resume, directory=tmp_path) == [("", 20)] * 2


def test_what_could_run_code_is_refused_on_every_rank(own: Path) -> None:
    for rank in range(2):
        path = own / str(rank) / "last.ckpt"
        checkpoint = torch.load(path, weights_only=True)
        torch.save({**checkpoint, "payload": print}, path)
    for rank, (raised, steps) in enumerate(run_on_ranks(resume, directory=own)):
        assert raised.startswith(f"UnsafeCheckpointError: Checkpoint `{own}/{rank}/last.ckpt` is not loaded, because")
        assert "print" in raised
        assert steps == 0


@on_ranks()
@like_torchrun()
def test_a_rank_may_load_alone_while_training(saved: Path) -> None:
    loaded: list[str] = []

    class Loads(models.Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_rank == 0 and not loaded:
                loaded.extend(self.trainer.strategy.load_checkpoint(saved / "1.ckpt")["state_dict"])

    make_trainer("bucketddp", max_epochs=1).fit(Loads(), models.loader())
    keys = [f"layers.{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")]
    assert loaded == (keys if dist.get_rank() == 0 else [])


@pytest.fixture
def of_fabric(tmp_path: Path) -> Path:
    """A checkpoint of weight three for each rank."""
    for rank in range(2):
        checkpoint = {"module": {"weight": torch.full((1, 1), 3.0)}}
        BucketDDPCheckpointIO().save_checkpoint(checkpoint, tmp_path / str(rank) / "model.ckpt")
    return tmp_path


def test_fabric_loads_on_every_rank_or_on_none(of_fabric: Path) -> None:
    assert run_on_ranks(load_with_fabric, directory=of_fabric) == [("", 3.0)] * 2
    path = of_fabric / "1" / "model.ckpt"
    path.write_bytes(path.read_bytes()[:-10])
    (on_zero, weight_on_zero), (on_one, weight_on_one) = run_on_ranks(load_with_fabric, directory=of_fabric)
    assert on_one.startswith(f"CheckpointReadError: Cannot read checkpoint `{path}`: it is cut short or damaged (")
    assert on_zero == f"{on_one} (on rank 1)"
    assert (weight_on_zero, weight_on_one) == (0.0, 0.0)


@on_ranks()
@like_torchrun()
def test_one_rank_may_load_raw_with_fabric(tmp_path: Path) -> None:
    fabric = make_fabric("bucketddp")
    module = fabric.setup(torch.nn.Linear(1, 1, bias=False))
    if dist.get_rank() == 0:
        BucketDDPCheckpointIO().save_checkpoint({"weight": torch.full((1, 1), 3.0)}, tmp_path / "model.ckpt")
        fabric.load_raw(tmp_path / "model.ckpt", module)
    fabric.barrier()  # otherwise this rank may end while the other one still connects to it
    assert (module.weight.item() == 3) == (dist.get_rank() == 0)
