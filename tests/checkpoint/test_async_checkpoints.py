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
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning_utilities.core import rank_zero
from torch import Tensor, nn

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPCheckpointIO, BucketDDPStrategy
from tests.support.ranks import on_ranks, raised_by, run_on_ranks
from tests.support.scripts import fabrics, models
from tests.support.scripts.checkpoints import ADVICE, Saves, Scheduled, assert_same_state, full_disk, state_in
from tests.support.scripts.fabrics import ROOTS
from tests.support.scripts.trainers import like_torchrun, lines_logged, make_trainer

SAVED_AFTER = 2  # batches
WAIT_S = 50  # for what comes soon, or never


class HeldCheckpointIO(BucketDDPCheckpointIO):
    """Takes its time: until it is told to write, or for some seconds."""

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
            self.weights = {name: value.tolist() for name, value in pl_module.state_dict().items()}
            trainer.save_checkpoint(self.path)
        if self.num_batches > self.after:
            self.num_batches_without_file += not self.path.exists()


class Releases(Callback):
    """Lets the storage write when training has gone on for three more batches."""

    def on_train_batch_start(self, trainer: Trainer, _: Any, __: Any, batch_idx: int) -> None:
        if batch_idx == SAVED_AFTER + 3:
            trainer.strategy.checkpoint_io.released.set()  # type: ignore[attr-defined]


class WaitsForFailure(Callback):
    """Lets rank zero train on when the write has failed, not before."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        deadline = time.monotonic() + WAIT_S
        writer = trainer.strategy._writer  # type: ignore[attr-defined]
        while writer._in_flight is not None and not writer.has_failed and time.monotonic() < deadline:
            time.sleep(0.01)


class Raises(Callback):
    def on_train_batch_start(self, _: Any, __: Any, ___: Any, batch_idx: int) -> None:
        if batch_idx == SAVED_AFTER + 1:
            raise RuntimeError("a mistake of the user's")


class FullDiskFromSecondEpoch(Callback):
    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def on_train_epoch_start(self, trainer: Trainer, _: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.strategy.wait_for_checkpoints()  # type: ignore[attr-defined]
            self._stack.enter_context(full_disk(1000))


def trainer_of(*callbacks: Callback, strategy: BucketDDPStrategy | None = None, **options: Any) -> Trainer:
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    strategy = strategy or BucketDDPStrategy(async_checkpoints=True)
    return make_trainer(strategy, callbacks=list(callbacks), enable_checkpointing=saves, **options)


@like_torchrun()
def train_while_writing(*, path: Path) -> dict[str, Any]:
    """Training gets on before anything is written."""
    saves, plugin = SavesOnce(path), HeldCheckpointIO()
    model = models.Regression()
    trainer = trainer_of(saves, Releases(), plugins=plugin, max_epochs=1)
    trainer.fit(model, models.loader())
    return {
        "saved": saves.weights,
        "final": {name: value.tolist() for name, value in model.state_dict().items()},
        "num_batches_without_file": saves.num_batches_without_file,
        "stats": trainer.strategy.checkpoint_stats,  # type: ignore[attr-defined]
    }


@like_torchrun()
def fail_while_training(*, path: Path, after: int = SAVED_AFTER, **options: Any) -> tuple[str | None, int]:
    """What the fit raises when a write fails, and how many batches it has trained by then."""
    saves = SavesOnce(path, after=after)
    strategy = BucketDDPStrategy(async_checkpoints=True, **options)
    trainer = trainer_of(saves, WaitsForFailure(), strategy=strategy, max_epochs=1)
    return raised_by(lambda: trainer.fit(models.Regression(), models.loader())), saves.num_batches


@like_torchrun()
def raise_while_writing(*, path: Path) -> tuple[str | None, bool]:
    """What the fit raises, and whether what it was writing is there at once."""
    trainer = trainer_of(SavesOnce(path), Raises(), plugins=HeldCheckpointIO(0.5), max_epochs=1)
    raised = raised_by(lambda: trainer.fit(models.Regression(), models.loader()))
    return raised, path.exists()


@like_torchrun()
def fail_to_save_on_exception(*, path: Path) -> str | None:
    """What the fit raises when the save after an exception fails."""
    trainer = trainer_of(Saves(path), Raises(), max_epochs=1)
    return raised_by(lambda: trainer.fit(models.Regression(), models.loader()))


@like_torchrun()
def fill_the_disk(*, directory: Path) -> str | None:
    """Keep one checkpoint, on a disk that has room for the first one only; what the fit raises."""
    with ExitStack() as stack:
        newest = ModelCheckpoint(directory, filename="{epoch}", save_top_k=1, enable_version_counter=False)
        trainer = trainer_of(newest, FullDiskFromSecondEpoch(stack), max_epochs=2)
        return raised_by(lambda: trainer.fit(models.Regression(), models.loader()))


@like_torchrun()
def fit_with_model_checkpoint(
    *, directory: Path, is_async: bool, save_last: Any = True, slow_s: float = 0.0
) -> tuple[str, list[str]]:
    """Save often: during epochs and after validations, the best two and the last; what it cost, and what is logged."""
    best = ModelCheckpoint(directory, monitor="loss", filename="{step}-{loss:.6f}", save_top_k=2, save_last=save_last)
    during = ModelCheckpoint(directory, filename="during-{step}", every_n_train_steps=4, save_top_k=-1)
    strategy = BucketDDPStrategy(async_checkpoints=is_async)
    plugin = HeldCheckpointIO(slow_s)
    trainer = trainer_of(best, during, strategy=strategy, plugins=plugin, max_epochs=3, val_check_interval=5)
    with lines_logged("lightning_bucketddp", rank_zero.log.name, level=logging.INFO) as lines:
        trainer.fit(Scheduled(), models.loader(), models.loader())
    return strategy.checkpoint_stats.describe(), [line for line in lines if "checkpoints " in line]


@like_torchrun()
def with_plugin_that_does_the_same() -> str | None:
    trainer = trainer_of(plugins=AsyncCheckpointIO(), max_epochs=1)
    return raised_by(lambda: trainer.fit(models.Regression(), models.loader()))


class SavesAroundTraining(Callback):
    """Saves before training begins and when it has ended, and looks for the file at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.was_there: list[bool] = []

    def on_fit_start(self, trainer: Trainer, _: Any) -> None:
        self.save(trainer)

    def on_fit_end(self, trainer: Trainer, _: Any) -> None:
        self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        path = self._directory / f"{len(self.was_there)}.ckpt"
        trainer.save_checkpoint(path)
        self.was_there.append(path.exists())


@like_torchrun()
def load_while_training(*, path: Path) -> int:
    """The step in a checkpoint that a callback saves and loads in one batch."""
    loaded = []

    class Loads(Callback):
        def on_train_batch_end(self, trainer: Trainer, _: Any, __: Any, ___: Any, batch_idx: int) -> None:
            if batch_idx == SAVED_AFTER - 1:
                loaded.append(trainer.strategy.load_checkpoint(path)["global_step"])

    trainer = trainer_of(SavesOnce(path), Loads(), plugins=HeldCheckpointIO(0.3), max_epochs=1)
    trainer.fit(models.Regression(), models.loader())
    [step] = loaded
    return int(step)


# --- Fabric


@like_torchrun()
def save_with_fabric(*, path: Path, root: str) -> dict[str, Any]:
    """Save, change the weights while nothing is written yet, and load what was saved."""
    fabric = fabrics.make_fabric(fabrics.strategy_of(root, async_checkpoints=True), root=root)
    module = fabric.setup_module(nn.Linear(2, 2))
    saved = module.weight.tolist()
    fabric.save(path, {"module": module})
    _zero(module.weight)
    fabric.load(path, {"module": module})
    return {"saved": saved, "loaded": module.weight.tolist(), "stats": fabric.strategy.checkpoint_stats}


def _zero(weight: Tensor) -> None:
    weight.detach().zero_()


@like_torchrun()
def fail_with_fabric(*, path: Path, ends: bool) -> str | None:
    """What the next save raises after one that fails, or the end of the program."""
    fabric = fabrics.make_fabric(fabrics.strategy_of(fabrics.ROOTS[0], async_checkpoints=True))
    fabric.save(path / "below" / "a file", {})
    fabric.barrier()
    if ends:
        return raised_by(fabric.strategy.wait_for_checkpoints)
    raised = raised_by(lambda: fabric.save(path.parent / "next.ckpt", {}))
    fabric.strategy.wait_for_checkpoints()
    assert dist.get_rank() != 0 or (path.parent / "next.ckpt").exists()
    return raised


def test_training_goes_on_and_the_weights_of_the_step_are_saved(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    ranks = run_on_ranks(train_while_writing, path=path)
    # Nothing was written before training had gone on for three batches.
    assert all(rank["num_batches_without_file"] >= 3 for rank in ranks)
    assert ranks[0]["saved"] == ranks[1]["saved"] != ranks[0]["final"] == ranks[1]["final"]
    checkpoint = torch.load(path, weights_only=True)
    assert {name: value.tolist() for name, value in checkpoint["state_dict"].items()} == ranks[0]["saved"]
    assert checkpoint["global_step"] == SAVED_AFTER
    [momentum, *_] = checkpoint["optimizer_states"][0]["state"].values()
    assert momentum["momentum_buffer"].shape == (8, 4)
    assert [rank["stats"].num_saves for rank in ranks] == [1, 0]
    assert ranks[0]["stats"].snapshot_s > 0
    assert ranks[0]["stats"].writing_s == 0


# With two ranks the news travel with the next step; in one process there is nobody to tell. After the last batch
# there is no step any more, only the end.
@pytest.mark.parametrize(
    ("world_size", "options", "saved_after", "trained"),
    [
        (1, {}, 2, 2),
        (1, {"gradient_weight": "batch_size"}, 2, 3),
        (2, {}, 2, 3),
        (2, {"uneven_data": True}, 2, 3),
        (2, {}, 10, 10),
    ],
)
@pytest.mark.sampled(2)
def test_a_failed_write_is_raised_on_every_rank_at_the_next_step_or_at_the_end(
    world_size: int, options: dict[str, Any], saved_after: int, trained: int, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "model.ckpt"
    ranks = run_on_ranks(fail_while_training, world_size=world_size, path=path, after=saved_after, **options)
    text = f"CheckpointWriteError: Could not write checkpoint `{path}`: Not a directory. {ADVICE}"
    assert ranks == [(text, trained), (f"{text} (on rank 0)", trained)][:world_size]


def test_an_exception_waits_for_what_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    ranks = run_on_ranks(raise_while_writing, path=path)
    assert ranks[0] == ("RuntimeError: a mistake of the user's", True)
    assert ranks[1][0] == ranks[0][0]
    assert state_in(path)["global_step"] == SAVED_AFTER


def test_a_save_after_an_exception_is_not_left_to_the_background(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "model.ckpt"
    rank_zero, rank_one = run_on_ranks(fail_to_save_on_exception, path=path)
    assert rank_zero == f"CheckpointWriteError: Could not write checkpoint `{path}`: Not a directory. {ADVICE}"
    assert rank_one == f"{rank_zero} (on rank 0)"


def test_the_checkpoint_before_stays_when_the_next_one_cannot_be_written(tmp_path: Path) -> None:
    rank_zero, rank_one = run_on_ranks(fill_the_disk, directory=tmp_path)
    path = tmp_path / "epoch=1.ckpt"
    assert rank_zero == f"CheckpointWriteError: Could not write checkpoint `{path}`: File too large. {ADVICE}"
    assert rank_one == f"{rank_zero} (on rank 0)"
    assert [file.name for file in tmp_path.iterdir()] == ["epoch=0.ckpt"]
    assert state_in(tmp_path / "epoch=0.ckpt")["global_step"] == 10


def test_the_same_files_are_written_as_otherwise_and_the_time_is_measured(tmp_path: Path) -> None:
    reports = {}
    for name, is_async in (("async", True), ("sync", False)):
        reports[name] = run_on_ranks(fit_with_model_checkpoint, directory=tmp_path / name, is_async=is_async)
    files = sorted(file.name for file in (tmp_path / "sync").iterdir())
    assert len(files) == 2 + 1 + 7
    assert sorted(file.name for file in (tmp_path / "async").iterdir()) == files
    for file in files:
        assert_same_state(tmp_path / "async" / file, tmp_path / "sync" / file)
    number = r"(\d+\.\d{3})"
    in_background = (
        rf" \(snapshot {number} s, waiting {number} s, writing 0\.000 s\), wrote for {number} s in the background"
    )
    for name, [(cost, logged), _] in reports.items():
        expected = rf"\d+ checkpoints held up training for {number} s{in_background if name == 'async' else ''}"
        match = re.fullmatch(expected, cost)
        assert match is not None
        assert all(float(seconds) > 0 for seconds in match.groups()[:2])
        assert logged == [] or float(match[1]) >= 1  # too little to tell


def test_checkpoints_that_take_a_hundredth_of_the_time_are_in_the_log(tmp_path: Path) -> None:
    ranks = run_on_ranks(fit_with_model_checkpoint, directory=tmp_path, is_async=False, slow_s=0.2)
    (cost, [line]), (_, on_rank_one) = ranks
    assert line.endswith(f"; {cost}.")
    assert on_rank_one == []


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
def test_only_training_goes_on_meanwhile(tmp_path: Path) -> None:
    """Files are there as soon as `save_checkpoint` returns before, right after and long after training."""
    saves = SavesAroundTraining(tmp_path)
    trainer = trainer_of(saves, plugins=HeldCheckpointIO(0.3), max_epochs=1)
    trainer.fit(models.Regression(), models.loader())
    saves.save(trainer)
    assert saves.was_there == [True] * 3


def test_what_is_loaded_while_training_goes_on_is_written_first(tmp_path: Path) -> None:
    assert run_on_ranks(load_while_training, path=tmp_path / "model.ckpt") == [SAVED_AFTER] * 2


def test_two_ways_to_write_in_the_background_are_refused() -> None:
    text = (
        "ValueError: `async_checkpoints=True` and the plugin `AsyncCheckpointIO` both write in the background. Pass one"
        " of them."
    )
    assert run_on_ranks(with_plugin_that_does_the_same) == [text, text]


# --- Fabric


@pytest.mark.parametrize("root", ROOTS)
def test_fabric_saves_the_weights_of_the_step(root: str, tmp_path: Path) -> None:
    for rank, result in enumerate(run_on_ranks(save_with_fabric, path=tmp_path / "model.ckpt", root=root)):
        assert result["loaded"] == result["saved"] != [[0, 0], [0, 0]]
        assert result["stats"].num_saves == (rank == 0)
        assert (result["stats"].snapshot_s > 0) == (rank == 0)


@pytest.mark.parametrize("ends", [False, True])
def test_fabric_raises_what_failed_on_every_rank(ends: bool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    rank_zero, rank_one = run_on_ranks(fail_with_fabric, path=tmp_path / "file", ends=ends)
    assert rank_zero.startswith(
        f"CheckpointWriteError: Could not write checkpoint `{tmp_path}/file/below/a file`: Not a"
    )
    assert rank_one == f"{rank_zero} (on rank 0)"
