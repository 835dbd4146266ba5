"""`async_checkpoints=True`: training goes on while rank zero writes, and every rank hears when that fails."""

from __future__ import annotations

import logging
import re
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning_utilities.core import rank_zero
from torch import nn

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPCheckpointIO, BucketDDPStrategy
from tests.support.ranks import on_ranks, raised_by, run_on_ranks
from tests.support.scripts import models
from tests.support.scripts.checkpoints import ADVICE, Saves, Scheduled, assert_same_state, full_disk, state_in
from tests.support.scripts.fabrics import ROOTS, make_fabric, strategy_of
from tests.support.scripts.trainers import like_torchrun, lines_logged, make_trainer

SAVED_AFTER = 2  # batches
WAIT_S = 50  # for what comes soon, or never


class HeldCheckpointIO(BucketDDPCheckpointIO):
    """Writes when it is released, or after some seconds."""

    def __init__(self, seconds: float = WAIT_S) -> None:
        self.released = threading.Event()
        self._seconds = seconds

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.released.wait(self._seconds)
        super().save_checkpoint(*args, **kwargs)


class SavesOnce(Callback):
    """Saves in the midst of an epoch and writes down what was saved, and what else happened until when."""

    def __init__(self, path: Path, *, after: int = SAVED_AFTER) -> None:
        self.path = path
        self.after = after
        self.weights: dict[str, Any] = {}
        self.num_batches = 0
        self.num_batches_without_file = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.num_batches += 1
        if self.num_batches == self.after:
            self.weights = weights_of(pl_module)
            trainer.save_checkpoint(self.path)
        if self.num_batches > self.after:
            self.num_batches_without_file += not self.path.exists()


class Raises(Callback):
    def on_train_batch_start(self, _: Any, __: Any, ___: Any, batch_idx: int) -> None:
        if batch_idx == SAVED_AFTER + 1:
            raise RuntimeError("a mistake of the user's")


def weights_of(module: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in module.state_dict().items()}


def trainer_of(*callbacks: Callback, strategy: BucketDDPStrategy | None = None, **options: Any) -> Trainer:
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    strategy = strategy or BucketDDPStrategy(async_checkpoints=True)
    options = {"max_epochs": 1, **options}
    return make_trainer(strategy, callbacks=list(callbacks), enable_checkpointing=saves, **options)


def raised_in(trainer: Trainer) -> str:
    return raised_by(lambda: trainer.fit(models.Regression(), models.loader()))


def could_not_write(path: Path, why: str = "Not a directory") -> str:
    """What this rank is to raise."""
    text = f"CheckpointWriteError: Could not write checkpoint `{path}`: {why}. {ADVICE}"
    return text if dist.get_rank() == 0 else f"{text} (on rank 0)"


@pytest.fixture
def below_a_file(tmp_path: Path) -> Path:
    """A path that cannot be written to."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "model.ckpt"


@on_ranks()
@like_torchrun()
def test_training_goes_on_and_the_weights_of_the_step_are_saved(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"

    def release(trainer: Trainer, _: Any, __: Any, batch_idx: int) -> None:
        if batch_idx == SAVED_AFTER + 3:
            trainer.strategy.checkpoint_io.released.set()  # type: ignore[attr-defined]

    saves, model = SavesOnce(path), models.Regression()
    trainer = trainer_of(saves, LambdaCallback(on_train_batch_start=release), plugins=HeldCheckpointIO())
    trainer.fit(model, models.loader())
    # Nothing was written before training had gone on for three batches.
    assert saves.num_batches_without_file >= 3
    assert saves.weights != weights_of(model)
    dist.barrier()
    checkpoint = torch.load(path, weights_only=True)
    assert {name: value.tolist() for name, value in checkpoint["state_dict"].items()} == saves.weights
    assert checkpoint["global_step"] == SAVED_AFTER
    [momentum, *_] = checkpoint["optimizer_states"][0]["state"].values()
    assert momentum["momentum_buffer"].shape == (8, 4)
    stats = trainer.strategy.checkpoint_stats  # type: ignore[attr-defined]
    assert (stats.num_saves, stats.snapshot_s > 0, stats.writing_s) == (
        (1, True, 0) if dist.get_rank() == 0 else (0, False, 0)
    )


# With two ranks the failure travels with the next step; in one process it is raised at once. After the last batch
# there is no step any more, only the end.
@pytest.mark.parametrize(
    ("world_size", "options", "saved_after", "trained"),
    [
        (1, {}, 2, 2),
        (2, {"uneven_data": True}, 2, 3),
        (2, {}, 10, 10),
    ],
)
@on_ranks()
@like_torchrun()
def test_a_failed_write_is_raised_on_every_rank_at_the_next_step_or_at_the_end(
    world_size: int, options: dict[str, Any], saved_after: int, trained: int, below_a_file: Path
) -> None:
    def wait_for_failure(trainer: Trainer, *_: Any) -> None:
        deadline = time.monotonic() + WAIT_S
        writer = trainer.strategy._writer  # type: ignore[attr-defined]
        while writer._in_flight is not None and not writer.has_failed and time.monotonic() < deadline:
            time.sleep(0.01)

    saves = SavesOnce(below_a_file, after=saved_after)
    strategy = BucketDDPStrategy(async_checkpoints=True, **options)
    raised = raised_in(trainer_of(saves, LambdaCallback(on_train_batch_end=wait_for_failure), strategy=strategy))
    assert (raised, saves.num_batches) == (could_not_write(below_a_file), trained)


@on_ranks()
@like_torchrun()
def test_an_exception_waits_for_what_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    raised = raised_in(trainer_of(SavesOnce(path), Raises(), plugins=HeldCheckpointIO(0.5)))
    assert raised == "RuntimeError: a mistake of the user's"
    if dist.get_rank() == 0:
        assert state_in(path)["global_step"] == SAVED_AFTER


@on_ranks()
@like_torchrun()
def test_a_save_after_an_exception_is_not_left_to_the_background(below_a_file: Path) -> None:
    assert raised_in(trainer_of(Saves(below_a_file), Raises())) == could_not_write(below_a_file)


@on_ranks()
@like_torchrun()
def test_the_checkpoint_before_stays_when_the_next_one_cannot_be_written(tmp_path: Path) -> None:
    with ExitStack() as stack:

        def fill_the_disk(trainer: Trainer, _: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.strategy.wait_for_checkpoints()  # type: ignore[attr-defined]
                stack.enter_context(full_disk(1000))

        newest = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=1, enable_version_counter=False)
        trainer = trainer_of(newest, LambdaCallback(on_train_epoch_start=fill_the_disk), max_epochs=2)
        assert raised_in(trainer) == could_not_write(tmp_path / "epoch=1.ckpt", "File too large")
    assert [file.name for file in tmp_path.iterdir()] == ["epoch=0.ckpt"]
    assert state_in(tmp_path / "epoch=0.ckpt")["global_step"] == 10


@like_torchrun()
def fit_with_model_checkpoint(
    *, directory: Path, is_async: bool, save_last: Any = True, slow_s: float = 0.0
) -> tuple[str, list[str]]:
    """Save often: during epochs and after validations, the best two and the last; what it cost, and what is logged."""
    best = ModelCheckpoint(directory, monitor="loss", filename="{step}-{loss:.6f}", save_top_k=2, save_last=save_last)
    during = ModelCheckpoint(directory, filename="during-{step}", every_n_train_steps=4, save_top_k=-1)
    strategy, plugin = BucketDDPStrategy(async_checkpoints=is_async), HeldCheckpointIO(slow_s)
    trainer = trainer_of(best, during, strategy=strategy, plugins=plugin, max_epochs=3, val_check_interval=5)
    with lines_logged("lightning_bucketddp", rank_zero.log.name, level=logging.INFO) as lines:
        trainer.fit(Scheduled(), models.loader(), models.loader())
    return strategy.checkpoint_stats.describe(), [line for line in lines if "checkpoints " in line]


def test_the_same_files_are_written_as_otherwise_and_the_time_is_measured(tmp_path: Path) -> None:
    reports = {}
    # So slow that what is not written in the background takes more than a hundredth of the time, and is in the log.
    for name, is_async, slow_s in (("async", True, 0.0), ("sync", False, 0.2)):
        options: dict[str, Any] = {"directory": tmp_path / name, "is_async": is_async, "slow_s": slow_s}
        reports[name] = run_on_ranks(fit_with_model_checkpoint, **options)
    files = sorted(file.name for file in (tmp_path / "sync").iterdir())
    assert len(files) == 2 + 1 + 7
    assert sorted(file.name for file in (tmp_path / "async").iterdir()) == files
    for file in files:
        assert_same_state(tmp_path / "async" / file, tmp_path / "sync" / file)
    number = r"(\d+\.\d{3})"
    in_background = (
        rf" \(snapshot {number} s, waiting {number} s, writing 0\.000 s\), wrote for {number} s in the background"
    )
    for name, [(cost, logged), (_, on_rank_one)] in reports.items():
        expected = rf"\d+ checkpoints held up training for {number} s{in_background if name == 'async' else ''}"
        match = re.fullmatch(expected, cost)
        assert match is not None
        assert all(float(seconds) > 0 for seconds in match.groups()[:2])
        assert logged == [] or float(match[1]) >= 1  # too little to tell
        assert on_rank_one == []
    (cost, [line]), _ = reports["sync"]
    assert line.endswith(f"; {cost}.")


def test_a_link_never_points_to_what_is_not_written_yet(tmp_path: Path) -> None:
    ranks = run_on_ranks(fit_with_model_checkpoint, directory=tmp_path, is_async=True, save_last="link")
    cost, [why, *_] = ranks[0]
    assert why == (
        "bucketddp: checkpoints are not written in the background, because of `save_last='link'`: the link would point"
        " to a file that is not there yet. Pass `save_last=True` instead."
    )
    assert "in the background" not in cost
    assert (tmp_path / "last.ckpt").is_symlink()
    assert state_in(tmp_path / "last.ckpt")["global_step"] == 30


@on_ranks()
@like_torchrun()
def test_only_training_goes_on_meanwhile_and_what_is_loaded_then_is_written_first(tmp_path: Path) -> None:
    """Files are there as soon as `save_checkpoint` returns before, right after and long after training."""
    was_there: list[bool] = []
    loaded: list[int] = []

    def save(trainer: Trainer, _: Any = None) -> None:
        path = tmp_path / f"{len(was_there)}.ckpt"
        trainer.save_checkpoint(path)
        was_there.append(path.exists())

    def load(trainer: Trainer, _: Any, __: Any, ___: Any, batch_idx: int) -> None:
        if batch_idx == SAVED_AFTER - 1:
            loaded.append(trainer.strategy.load_checkpoint(tmp_path / "model.ckpt")["global_step"])

    around = LambdaCallback(on_fit_start=save, on_fit_end=save, on_train_batch_end=load)
    trainer = trainer_of(SavesOnce(tmp_path / "model.ckpt"), around, plugins=HeldCheckpointIO(0.3))
    trainer.fit(models.Regression(), models.loader())
    save(trainer)
    assert was_there == [True] * 3
    assert loaded == [SAVED_AFTER]


@on_ranks()
@like_torchrun()
def test_two_ways_to_write_in_the_background_are_refused() -> None:
    assert raised_in(trainer_of(plugins=AsyncCheckpointIO())) == (
        "ValueError: `async_checkpoints=True` and the plugin `AsyncCheckpointIO` both write in the background. Pass one"
        " of them."
    )


@pytest.mark.parametrize("root", ROOTS)
@on_ranks()
@like_torchrun()
def test_fabric_saves_the_weights_of_the_step(root: str, tmp_path: Path) -> None:
    fabric = make_fabric(strategy_of(root, async_checkpoints=True), root=root)
    module = fabric.setup_module(nn.Linear(2, 2))
    saved = module.weight.tolist()
    fabric.save(tmp_path / "model.ckpt", {"module": module})
    module.weight.detach().zero_()  # while nothing is written yet
    fabric.load(tmp_path / "model.ckpt", {"module": module})
    assert module.weight.tolist() == saved
    stats = fabric.strategy.checkpoint_stats
    assert (stats.num_saves, stats.snapshot_s > 0) == ((1, True) if dist.get_rank() == 0 else (0, False))


@on_ranks()
@like_torchrun()
def test_fabric_raises_what_failed_on_every_rank_at_the_next_save_or_at_the_end(below_a_file: Path) -> None:
    fabric = make_fabric(strategy_of(ROOTS[0], async_checkpoints=True))
    following = below_a_file.parents[1] / "next.ckpt"
    for next_call in (lambda: fabric.save(following, {}), fabric.strategy.wait_for_checkpoints):
        fabric.save(below_a_file, {})
        fabric.barrier()
        assert raised_by(next_call) == could_not_write(below_a_file)
        fabric.strategy.wait_for_checkpoints()
        assert dist.get_rank() != 0 or following.exists()
