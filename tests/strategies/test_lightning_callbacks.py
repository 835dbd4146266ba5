"""Lightning's callbacks and tuners do with `bucketddp` what they do with `ddp`, on two processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor

from tests.support.ranks import raised_by
from tests.support.scripts.models import Regression, loader
from tests.support.scripts.trainers import like_torchrun, make_trainer, ours_and_ddp


class Tunable(Regression):
    """Has what the tuners look for."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.05
        self.batch_size = 4

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return loader(batch_size=self.batch_size)


class RisingMetric(Regression):
    """Logs a metric that falls until it rises, on rank 1 earlier than on rank 0."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self._shared = shared

    def validation_step(self, batch: list[Tensor]) -> None:
        is_worse_here = self.current_epoch >= (2 if self.global_rank == 1 else 4)
        # It falls so fast that one rank cannot make the mean rise.
        metric = float(self.current_epoch) if is_worse_here else -(10.0**self.current_epoch)
        self.log("metric", metric, sync_dist=self._shared)


@like_torchrun()
def stop_early(*, strategy: str, shared: bool) -> dict[str, Any]:
    """When this rank stops."""
    torch.manual_seed(dist.get_rank())
    module = RisingMetric(shared=shared)
    stopping = callbacks.EarlyStopping("metric", patience=0, verbose=False)
    trainer = make_trainer(strategy, max_epochs=8, num_sanity_val_steps=0, callbacks=stopping)
    trainer.fit(module, loader(), loader())
    return {"steps": trainer.global_step, "weights": _weights(module)}


class StopsOnRankOne(Callback):
    """A callback of the user that only one rank's data makes stop; the ranks agree through the strategy."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        wants_to = trainer.global_rank == 1 and trainer.global_step >= 7
        trainer.should_stop |= trainer.strategy.reduce_boolean_decision(wants_to, all=False)


class PredictionFiles(callbacks.BasePredictionWriter):
    def __init__(self, directory: Path) -> None:
        super().__init__("batch_and_epoch")
        self._directory = directory
        self.batches: list[Any] = []

    def write_on_batch_end(self, trainer: Trainer, pl_module: Any, prediction: Tensor, indices: Any, *_: Any) -> None:
        self.batches.append((indices, prediction.tolist()))

    def write_on_epoch_end(self, trainer: Trainer, pl_module: Any, predictions: Any, indices: Any) -> None:
        torch.save((torch.cat(predictions), indices), self._directory / f"rank{trainer.global_rank}.pt")


@like_torchrun()
def write_predictions(*, strategy: str, directory: Path) -> dict[str, Any]:
    """Predict with a trained module; what the writer was given, and what it wrote."""
    torch.manual_seed(dist.get_rank())
    module = Regression()
    directory /= strategy
    directory.mkdir(exist_ok=True)
    writer = PredictionFiles(directory)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=writer)
    trainer.fit(module, loader())
    trainer.predict(module, loader(), return_predictions=False)
    predictions, indices = torch.load(directory / f"rank{dist.get_rank()}.pt")
    return {"batches": writer.batches, "written": predictions.tolist(), "indices": indices}


MONITORS: dict[str, Callable[[list[str]], Callback]] = {
    "learning_rate": lambda _: callbacks.LearningRateMonitor(log_momentum=True),
    "device_stats": lambda _: callbacks.DeviceStatsMonitor(cpu_stats=True),
    "timer": lambda _: callbacks.Timer(duration={"hours": 1}),
    "lambda": lambda seen: callbacks.LambdaCallback(
        on_before_zero_grad=lambda *_: seen.append("zero"), on_before_optimizer_step=lambda *_: seen.append("step")
    ),
    "stops": lambda _: StopsOnRankOne(),
}


@like_torchrun()
def train_with_monitor(*, monitor: str, strategy: str, directory: Path) -> dict[str, Any]:
    """What this rank ends with, and which columns rank 0's log has."""
    torch.manual_seed(dist.get_rank())
    module = Regression()
    seen: list[str] = []
    logger = CSVLogger(directory, name="", version=f"{strategy}-{monitor}")
    callback: Any = MONITORS[monitor](seen)
    trainer = make_trainer(strategy, max_epochs=2, callbacks=callback, logger=logger, log_every_n_steps=5)
    trainer.fit(module, loader(), loader())
    log = Path(logger.log_dir) / "metrics.csv"
    return {
        "weights": _weights(module),
        "steps": trainer.global_step,
        "seen": seen,
        "columns": log.read_text().splitlines()[0] if dist.get_rank() == 0 and log.exists() else None,
        "timed": callback.time_elapsed("train") > 0 if monitor == "timer" else None,
    }


@like_torchrun()
def find_learning_rate(*, strategy: str, by_callback: bool, directory: Path) -> dict[str, Any]:
    """The rate that was found and the weights after a fit with it."""
    torch.manual_seed(dist.get_rank())
    module = Tunable()
    finder = callbacks.LearningRateFinder(num_training_steps=15) if by_callback else None
    trainer = make_trainer(strategy, max_epochs=2, default_root_dir=directory, callbacks=finder)
    if not by_callback:
        Tuner(trainer).lr_find(module, num_training=15)
    trainer.fit(module)
    return {"rate": module.lr, "weights": _weights(module), "steps": trainer.global_step}


@like_torchrun()
def find_batch_size(*, strategy: str, by_callback: bool) -> str:
    """How Lightning refuses to look for a batch size on several ranks."""
    trainer = make_trainer(strategy, max_epochs=1, callbacks=callbacks.BatchSizeFinder() if by_callback else None)
    return raised_by(lambda: trainer.fit(Tunable()) if by_callback else Tuner(trainer).scale_batch_size(Tunable()))


class Accident(Exception):
    """Something that happens to all ranks."""


class _Fails(Callback):
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            raise Accident


@like_torchrun()
def save_on_exception(*, strategy: str, by: str, directory: Path) -> dict[str, Any]:
    """The weights when all ranks fail, and those in the checkpoint that was written then."""
    torch.manual_seed(dist.get_rank())
    module = Regression()
    directory /= strategy
    saving = (
        callbacks.OnExceptionCheckpoint(directory, filename="failed")
        if by == "OnExceptionCheckpoint"
        else callbacks.ModelCheckpoint(directory, filename="failed", save_on_exception=True)
    )
    trainer = make_trainer(strategy, max_epochs=1, enable_checkpointing=True, callbacks=[_Fails(), saving])
    with suppress(Accident):
        trainer.fit(module, loader())
    [file] = directory.glob("*.ckpt")
    checkpoint = torch.load(file, weights_only=False)
    return {"weights": _weights(module), "saved": checkpoint["state_dict"], "step": checkpoint["global_step"]}


def _weights(module: LightningModule) -> dict[str, Any]:
    return {name: value.tolist() for name, value in module.state_dict().items()}


NUM_BATCHES = 10
saves_on_exception = pytest.mark.skipif(
    "save_on_exception" not in inspect.signature(ModelCheckpoint).parameters,
    reason="this Lightning's `ModelCheckpoint` does not save on exceptions",
)


# Rank 1's metric rises in the third epoch, which stops both ranks; the mean of both rises in the fifth.
@pytest.mark.parametrize(("shared", "epochs"), [(False, 3), (True, 5)])
def test_early_stopping_stops_all_ranks_at_the_step_of_ddp(shared: bool, epochs: int) -> None:
    ours, ddp = ours_and_ddp(stop_early, shared=shared)
    assert ours == [ddp[0]] * 2
    assert ours[0]["steps"] == epochs * NUM_BATCHES


@pytest.mark.parametrize("monitor", list(MONITORS))
@pytest.mark.sampled(2)
def test_training_under_a_callback_equals_ddp(monitor: str, tmp_path: Path) -> None:
    ours, ddp = ours_and_ddp(train_with_monitor, monitor=monitor, directory=tmp_path)
    assert ours == ddp
    assert ours[0]["weights"] == ours[1]["weights"]


def test_predictions_are_written_like_with_ddp(tmp_path: Path) -> None:
    ours, ddp = ours_and_ddp(write_predictions, directory=tmp_path)
    assert ours == ddp
    assert ours[0]["written"] != ours[1]["written"]  # each rank has its own samples


@pytest.mark.parametrize("by_callback", [True, False], ids=["callback", "tuner"])
def test_the_learning_rate_that_is_found_equals_ddp(by_callback: bool, tmp_path: Path) -> None:
    ours, ddp = ours_and_ddp(find_learning_rate, by_callback=by_callback, directory=tmp_path)
    assert ours == [ddp[0]] * 2
    assert ours[0]["rate"] != 0.05


@pytest.mark.parametrize("by_callback", [True, False], ids=["callback", "tuner"])
def test_looking_for_a_batch_size_is_refused_as_with_ddp(by_callback: bool) -> None:
    ours, ddp = ours_and_ddp(find_batch_size, by_callback=by_callback)
    assert ours == ddp
    assert all("not supported with distributed strategies" in error for error in ours)


@pytest.mark.parametrize("by", ["OnExceptionCheckpoint", pytest.param("ModelCheckpoint", marks=saves_on_exception)])
def test_an_exception_on_all_ranks_leaves_the_checkpoint_of_ddp(by: str, tmp_path: Path) -> None:
    ours, ddp = ours_and_ddp(save_on_exception, by=by, directory=tmp_path)
    for rank in ours:
        assert rank["step"] == 3
        assert rank["weights"] == ddp[0]["weights"]
        torch.testing.assert_close(rank["saved"], ddp[0]["saved"], rtol=0, atol=0)
