"""A run that is interrupted within an epoch ends it with the samples that are left, and its schedules go on."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.strategies.auto_resume import AutoResume
from tests.data.test_epoch_position import ByParity, Numbers, SizedStream
from tests.support.ranks import run_on_ranks
from tests.support.scripts.trainers import like_torchrun, make_trainer

NUM_EPOCHS = 3


class Interrupted(Exception):
    """Raised on all ranks."""


@dataclass(frozen=True)
class Program:
    """What is started; `stop` is the number of batches after which it is interrupted."""

    batch_size: int
    num_samples: int = 24
    data: str = "shuffled"
    global_batch_size: int | None = None
    stop: int | None = None
    num_epochs: int = 1
    saves: str = "on exception"


class Model(LightningModule):
    """Notes the samples that are in its weights, and a loss that never gets smaller."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.program = program
        self.num_batches = 0
        self.seen: list[int] = []
        self.rates: list[float] = []
        self._pending: list[int] = []

    def training_step(self, batch: Tensor) -> Tensor:
        if self.num_batches == self.program.stop:
            raise Interrupted
        self.num_batches += 1
        self._pending += batch.tolist()
        return self.layer(batch.view(-1, 1) / 100).square().mean()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.seen += self._pending
        self._pending = []

    def on_train_epoch_start(self) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, batch: Tensor) -> None:
        self.log("loss", torch.tensor(1.0))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}


def make_loader(program: Program) -> Any:
    if program.data == "stream":
        return DataLoader(SizedStream(program.num_samples), batch_size=program.batch_size)
    data = Numbers(program.num_samples)
    if program.data == "own batches":
        return DataLoader(data, batch_sampler=ByParity(range(program.num_samples), program.batch_size, False))
    return DataLoader(data, batch_size=program.batch_size, shuffle=True)


def callbacks(program: Program, directory: Path) -> list[Callback]:
    if program.saves == "on exception":
        return [OnExceptionCheckpoint(directory)]
    return [ModelCheckpoint(directory, save_on_train_epoch_end=program.saves == "after epochs")]


@like_torchrun()
def start(*, program: Program, directory: Path) -> tuple[list[int], list[float], list[str]]:
    """The samples, the learning rates of the epochs, and the warnings of this rank."""
    torch.manual_seed(1)
    AutoResume.num_fits_ended.clear()  # as in a new process
    strategy = BucketDDPStrategy(
        auto_resume=True, global_batch_size=program.global_batch_size, shard_iterable=program.data == "stream"
    )
    module = Model(program)
    trainer = make_trainer(
        strategy,
        default_root_dir=directory,
        max_epochs=program.num_epochs,
        callbacks=callbacks(program, directory),
        enable_checkpointing=True,
        use_distributed_sampler=program.data != "own batches",
        num_sanity_val_steps=0,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(Interrupted):
            trainer.fit(module, make_loader(program), DataLoader(Numbers(4)))
    return module.seen, module.rates, [str(it.message) for it in caught if "begins again" in str(it.message)]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(Program(2, stop=2), Program(4), id="larger"),
        pytest.param(Program(4, stop=2), Program(3), id="smaller"),
        pytest.param(Program(1, stop=5), Program(4, stop=1), id="twice"),
        pytest.param(Program(2, stop=2, global_batch_size=4), Program(4, global_batch_size=10), id="global"),
        pytest.param(Program(2, stop=2, data="stream"), Program(5, data="stream"), id="stream"),
    ],
)
def test_a_batch_size_that_changes_leaves_out_no_sample_and_repeats_none(
    first: Program, then: Program, tmp_path: Path
) -> None:
    starts = [first, then] + ([Program(2)] if then.stop else [])
    ranks = [rank for program in starts for rank in run_on_ranks(start, program=program, directory=tmp_path)]
    seen = [sample for samples, _, _ in ranks for sample in samples]
    assert sorted(seen) == list(range(24))


def test_batches_of_the_users_own_that_change_begin_again_and_say_so(tmp_path: Path) -> None:
    options: dict[str, Any] = {"world_size": 1, "directory": tmp_path}
    first = Program(2, stop=3, data="own batches")
    run_on_ranks(start, program=first, **options)
    [(seen, _, told)] = run_on_ranks(start, program=replace(first, stop=5), **options)
    assert (len(seen), told) == (10, [])  # with batches that are the same it goes on
    [(seen, _, [told_once])] = run_on_ranks(start, program=Program(4, data="own batches"), **options)
    assert sorted(seen) == list(range(24))
    assert told_once.startswith("bucketddp: the data of this epoch begins again. Which samples are in")


@pytest.mark.parametrize("saves", ["on exception", "after validation", "after epochs"])
def test_a_run_that_is_interrupted_in_each_epoch_lowers_its_rate(saves: str, tmp_path: Path) -> None:
    program = Program(6, num_epochs=NUM_EPOCHS, saves=saves)
    options: dict[str, Any] = {"world_size": 1}
    [(_, undisturbed, _)] = run_on_ranks(start, program=program, directory=tmp_path / "undisturbed", **options)
    assert undisturbed == pytest.approx([1, 1, 0.1])
    rates = []
    # 4 batches in each epoch: the middle of the first, and of the next ones.
    for stop in (2, 4, None) if saves == "on exception" else (6, 6, None):
        [(_, seen, _)] = run_on_ranks(
            start, program=replace(program, stop=stop), directory=tmp_path / "disturbed", **options
        )
        rates += seen
    assert rates[-1] == pytest.approx(0.1)
