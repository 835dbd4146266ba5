"""Checkpoints through the Trainer: those of `ddp` and ours are one, and every rank learns of a failure."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from benchmarks.ports import own_port
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.wording import wrap
from tests.support.disks import small_disk
from tests.support.jobs.checkpoint import number_in, save_numbered
from tests.support.programs import REPOSITORY, run
from tests.support.ranks import on_ranks, raised_by, run_on_ranks
from tests.support.scripts import models
from tests.support.scripts.checkpoints import ADVICE, Saves, Scheduled, assert_same_state, full_disk, state_in
from tests.support.scripts.hooks import HOOKS
from tests.support.scripts.trainers import like_torchrun, make_trainer


@like_torchrun()
def fit_and_save(*, strategy: str, max_epochs: int, save_to: Path, resume_from: Path | None = None) -> None:
    """Train until `max_epochs`, from the start or from a checkpoint, and save."""
    torch.manual_seed(dist.get_rank())
    trainer = make_trainer(strategy, max_epochs=max_epochs)
    trainer.fit(Scheduled(), models.loader(), ckpt_path=resume_from)
    trainer.save_checkpoint(save_to)


class TriesToSave(Callback):
    """Saves after each epoch, and goes on when that fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raised: list[str | None] = []

    def on_train_epoch_end(self, trainer: Trainer, _: Any) -> None:
        self.raised.append(raised_by(lambda: trainer.save_checkpoint(self.path)))


@like_torchrun()
def train_through_failures(*, path: Path) -> tuple[list[str | None], dict[str, Any]]:
    """What three saves raise, and the state that training ends with all the same."""
    tries = TriesToSave(path)
    trainer = make_trainer("bucketddp", max_epochs=3, callbacks=tries)
    trainer.fit(Scheduled(), models.loader())
    state = {
        "weights": {name: value.tolist() for name, value in trainer.lightning_module.state_dict().items()},
        "optimizer": str(trainer.optimizers[0].state_dict()),
    }
    return tries.raised, state


class LosesTheOthers(Callback):
    def on_train_batch_start(self, _: Any, __: Any, ___: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            dist.destroy_process_group()
            raise RuntimeError("some rank has failed")


@like_torchrun()
def save_alone(*, path: Path, port: int, **options: Any) -> tuple[str | None, list[str]]:
    """Save when there is no process group any more; what the fit raises, and what is warned of."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    strategy = BucketDDPStrategy(**HOOKS["power_sgd"](), rank_seeds=True, **options)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[Saves(path), LosesTheOthers()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            raised = raised_by(lambda: trainer.fit(Scheduled(), models.loader()))
        finally:
            # For the next job.
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    return raised, [str(warning.message) for warning in caught if "bucketddp" in str(warning.message)]


@pytest.mark.parametrize(("first", "second"), [("ddp", "bucketddp"), ("bucketddp", "ddp"), ("bucketddp", "bucketddp")])
def test_a_resumed_run_equals_an_uninterrupted_one(first: str, second: str, tmp_path: Path) -> None:
    run_on_ranks(fit_and_save, strategy=first, max_epochs=1, save_to=tmp_path / "1.ckpt")
    run_on_ranks(
        fit_and_save, strategy=second, max_epochs=3, save_to=tmp_path / "3.ckpt", resume_from=tmp_path / "1.ckpt"
    )
    run_on_ranks(fit_and_save, strategy="ddp", max_epochs=3, save_to=tmp_path / "expected.ckpt")
    assert_same_state(tmp_path / "3.ckpt", tmp_path / "expected.ckpt")


@pytest.mark.parametrize(
    ("before", "first", "after", "second"),
    [(2, "ddp", 1, "bucketddp"), (1, "bucketddp", 2, "ddp")],
)
def test_a_checkpoint_resumes_at_another_world_size(
    before: int, first: str, after: int, second: str, tmp_path: Path
) -> None:
    run_on_ranks(fit_and_save, world_size=before, strategy=first, max_epochs=1, save_to=tmp_path / "before.ckpt")
    run_on_ranks(
        fit_and_save,
        world_size=after,
        strategy=second,
        max_epochs=1,  # which the checkpoint has reached
        save_to=tmp_path / "after.ckpt",
        resume_from=tmp_path / "before.ckpt",
    )
    assert_same_state(tmp_path / "after.ckpt", tmp_path / "before.ckpt")


class SavesAlone(Callback):
    """Saves on rank 0 alone, as a script does by mistake."""

    def __init__(self, where: str) -> None:
        self._where = where

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            self.save_in("on_train_batch_end", trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.save_in("on_train_end", trainer)

    def save_in(self, where: str, trainer: Trainer) -> None:
        if where == self._where and trainer.is_global_zero:
            trainer.save_checkpoint(Path(os.environ["RESULTS"], "alone.ckpt"))


def main(where: str) -> None:
    saves = SavesAlone(where)
    trainer = make_trainer("bucketddp", devices=2, max_epochs=1, callbacks=saves)
    trainer.fit(models.ConvBatchNorm(), models.loader())
    saves.save_in("after", trainer)


# The other rank waits in a forward, for buffers; at the end of the fit; or it has ended.
@pytest.mark.parametrize("where", ["on_train_batch_end", pytest.param("on_train_end", marks=pytest.mark.long), "after"])
def test_a_rank_that_saves_alone_is_told_to_save_on_all(where: str, tmp_path: Path) -> None:
    ended = run(
        *("-m", "tests.strategies.test_trainer_checkpoints", where),
        root="lightning.pytorch",
        directory=tmp_path,
        cwd=REPOSITORY,
    )
    text = (
        f"RuntimeError: Rank 0 saves checkpoint `{tmp_path}/alone.ckpt`, and rank 1 did not. Call"
        " `trainer.save_checkpoint` on all ranks: rank 0 writes the file."
    )
    assert (ended.returncode, text in ended.output) == (1, True), ended.output
    of_rank_one = "Rank 1 is stopping because another rank failed first.\n[rank1]: Rank 0 "
    assert (of_rank_one in ended.output) == (where != "after")
    assert not (tmp_path / "alone.ckpt").exists()


def save_in_background(directory: Path, *, max_epochs: int) -> str:
    """Save each epoch with `AsyncCheckpointIO`; return what the fit raises."""
    saving = {
        "callbacks": ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1),
        "plugins": AsyncCheckpointIO(),
        "enable_checkpointing": True,
    }
    trainer = make_trainer("bucketddp", max_epochs=max_epochs, **saving)
    return raised_by(lambda: trainer.fit(Scheduled(), models.loader()))


# With one epoch nothing comes after the failure at which it could be raised, but the end.
@pytest.mark.parametrize("max_epochs", [1, 2])
@on_ranks()
@like_torchrun()
def test_a_failure_in_the_background_is_raised_on_every_rank(max_epochs: int, tmp_path: Path) -> None:
    with full_disk(1000):
        error = save_in_background(tmp_path, max_epochs=max_epochs)
    assert error.startswith(f"CheckpointWriteError: Could not write checkpoint `{tmp_path}/epoch=")
    assert error.endswith(f".ckpt`: File too large. {ADVICE}" + " (on rank 0)" * dist.get_rank())


def test_training_can_go_on_after_a_save_that_fails_on_every_rank(tmp_path: Path) -> None:
    undisturbed = run_on_ranks(train_through_failures, path=tmp_path / "model.ckpt")
    assert [raised for raised, _ in undisturbed] == [[""] * 3] * 2
    with small_disk(num_bytes=4_003_000) as disk:
        path = disk.path / "model.ckpt"
        save_numbered(1, str(path))  # which fills it
        ranks = run_on_ranks(train_through_failures, path=path)
        assert [file.name for file in disk.path.iterdir()] == ["model.ckpt"]
        assert number_in(str(path)) == 1
    text = f"CheckpointWriteError: Could not write checkpoint `{path}`: No space left on device. {ADVICE}"
    assert [raised for raised, _ in ranks] == [[text] * 3, [f"{text} (on rank 0)"] * 3]
    assert [state for _, state in ranks] == [state for _, state in undisturbed]


@pytest.mark.parametrize("is_async", [False, True])
def test_rank_zero_saves_alone_when_the_others_cannot_be_reached(is_async: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    ranks = run_on_ranks(save_alone, path=path, port=own_port(), async_checkpoints=is_async)
    assert [raised for raised, _ in ranks] == ["RuntimeError: some rank has failed"] * 2
    text = (
        "bucketddp: the other ranks cannot be reached any more. What they have of their own, the state of the"
        f" communication hook and the random numbers, is missing in checkpoint `{path}`."
    )
    assert ranks[0][1] == [wrap(text)]
    assert ranks[1][1] == []
    assert state_in(path)["global_step"] == 3
    # Rank zero has its own; whoever resumes is told that others are missing.
    state = torch.load(path, weights_only=True)["bucketddp"]
    assert len(state["rank_seeds"]["states"]) == 1
    assert [entries["iter"] for entries in state["comm_hook_state"]["by_rank"]] == [3]


if __name__ == "__main__":
    main(sys.argv[1])
