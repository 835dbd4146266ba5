"""`auto_resume`: a program that is started again goes on by itself, from its own newest checkpoint that is intact."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import zipfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning_utilities.core import rank_zero
from lightning_utilities.core.imports import RequirementCache
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.strategies.auto_resume import AutoResume, _reopen_csv, plain
from tests.data.test_epoch_position import Numbers
from tests.support.ranks import on_ranks, run_on_ranks
from tests.support.scripts.evaluations import ByParity
from tests.support.scripts.trainers import like_torchrun, lines_logged, make_trainer, workers_allowed


class Interrupted(Exception):
    """Raised on all ranks, in the place of what ends a run."""


@dataclass(frozen=True)
class Setting:
    """How a run trains."""

    loader: str = "shuffled"
    num_samples: int = 28  # with `loader="two"` there is another dataset with half of them
    batch_size: int = 2
    saves: bool = False  # every step, and not only what an exception leaves
    saves_on_exception: bool = True
    checkpoints: dict[str, Any] = field(default_factory=dict)  # options of the `ModelCheckpoint` in the place of ours
    scores: Sequence[float] = ()  # what it logs as `score`, by step
    accumulates: dict[int, int] = field(default_factory=dict)  # so many batches, from which epoch on
    stops: bool = False  # a hook ends the run after the first epoch
    saves_itself: bool = False  # at the end of each epoch, when nobody has asked for its mean loss yet
    is_manual: bool = False  # optimizes by itself
    validates_first: bool = False  # before the fit
    has_plateau: bool = False  # validates, with a loss that never gets smaller, which its learning rate follows
    follows: str = "loss"  # or "of training", the mean loss of an epoch
    schedule: str | None = None  # its learning rate gets smaller after each `step` or `epoch`
    trainer: dict[str, Any] = field(default_factory=dict)
    global_batch_size: int | None = None
    num_epochs: int = 2


class Interruption(NamedTuple):
    """Where a run is interrupted: at a batch (counted over all epochs, or in this start), in a hook."""

    batch: int
    hook: str = "training_step"


@dataclass
class Outcome:
    """What a start has done on this rank."""

    begun_at: int | None = None  # the step; None: it had nothing to do
    ended_at: int = 0
    is_interrupted: bool = False
    resumed_from: str | None = None
    # The samples that it has trained on, by epoch, in order; micro-batches whose gradients are lost are not.
    seen: dict[int, list[int]] = field(default_factory=dict)
    logged: set[tuple[int, float]] = field(default_factory=set)  # the first samples of batches, by a logger's step
    rates: list[float] = field(default_factory=list)  # the learning rates of the epochs
    weights: list[Tensor] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)  # what was logged about `auto_resume`, and warned
    # What the `ModelCheckpoint` knows: the scores of the best checkpoints by their names, and the best one.
    best: tuple[dict[str, float], str, Any] = ({}, "", None)


class Recorder(DummyLogger):
    """Keeps at which step batches are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: set[tuple[int, float]] = set()

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:  # type: ignore[override]
        if "first" in metrics:
            self.logged.add((step, metrics["first"]))


class Seeing(LightningModule):
    """Writes down the samples that optimizer steps were made of."""

    def __init__(self, setting: Setting, interruption: Interruption | None, width: int = 2, note: str = "") -> None:
        super().__init__()
        self.save_hyperparameters("note")
        self.layer = nn.Linear(1, width)
        self.automatic_optimization = not setting.is_manual
        self.setting, self.interruption = setting, interruption
        self.outcome = Outcome()
        self._num_batches = 0
        self._pending: list[int] = []

    def on_fit_start(self) -> None:
        self.outcome.resumed_from = Path(self.trainer.ckpt_path).name if self.trainer.ckpt_path else None

    def on_train_start(self) -> None:
        self.outcome.begun_at = self.trainer.global_step

    def on_train_epoch_start(self) -> None:
        self._interrupt("on_train_epoch_start")
        self.outcome.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def _interrupt(self, hook: str, batch: int | None = None) -> None:
        if self.interruption == (self.trainer.fit_loop.total_batch_idx if batch is None else batch, hook):
            raise Interrupted

    def training_step(self, batch: Any) -> Tensor:
        self._interrupt("training_step")
        self._interrupt("this start", self._num_batches)
        self._num_batches += 1
        given = batch if isinstance(batch, list) else [batch]
        batches = [torch.as_tensor(one) for one in given if one is not None]
        self.log("first", given[0].view(-1)[0])
        self._pending += [1000 * number + int(index) for number, one in enumerate(batches) for index in one.view(-1)]
        numbers = torch.cat([one.view(-1) for one in batches]).float()
        if self.setting.scores:
            self.log("score", self.setting.scores[self.global_step])
        loss: Tensor = self.layer(numbers.view(-1, 1) / 100).square().mean()
        if self.setting.follows == "of training":
            self.log("of training", loss, on_step=False, on_epoch=True, sync_dist=True)
        if self.setting.is_manual:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self._complete_step()
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("loss", torch.tensor(1.0))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self._complete_step()

    def _complete_step(self) -> None:
        self.outcome.seen.setdefault(self.current_epoch, []).extend(self._pending)
        self._pending = []
        self._interrupt("optimizer_step")

    def on_train_batch_end(self, *args: Any) -> None:
        self._interrupt("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = self.setting.stops
        if self.setting.saves_itself:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/checkpoints/{self.current_epoch}.ckpt")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        if self.setting.schedule is not None:
            falling = {"scheduler": ExponentialLR(optimizer, 0.5), "interval": self.setting.schedule}
            return {"optimizer": optimizer, "lr_scheduler": falling}
        if not self.setting.has_plateau:
            return optimizer
        schedule = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": self.setting.follows}}


def make_loader(setting: Setting) -> Any:
    data: Any = Numbers(setting.num_samples)
    if setting.loader == "workers":
        return DataLoader(data, batch_size=2, shuffle=True, num_workers=1)
    if setting.loader == "own generator":
        own = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        return DataLoader(data, batch_size=2, sampler=RandomSampler(data, num_samples=14, generator=own))
    if setting.loader == "own batches":
        return DataLoader(data, batch_sampler=ByParity(range(len(data)), setting.batch_size, False))
    if setting.loader == "two":
        return [
            DataLoader(data, batch_size=2, shuffle=True),
            DataLoader(Numbers(setting.num_samples // 2), batch_size=2, shuffle=True),
        ]
    return DataLoader(data, batch_size=setting.batch_size, shuffle=True)


@like_torchrun()
def run_program(
    *, fits: list[Interruption | None], setting: Setting, is_new_process: bool = True, **options: Any
) -> list[Outcome]:
    """Run a program that fits as often, until it is interrupted; what each fit has done."""
    if is_new_process:  # which has not fitted before, as far as it knows
        AutoResume.num_fits_ended.clear()
    outcomes: list[Outcome] = []
    while len(outcomes) < len(fits) and not (outcomes and outcomes[-1].is_interrupted):
        outcomes.append(fit(fits[len(outcomes)], setting=setting, **options))
    return outcomes


def fit(
    interruption: Interruption | None,
    *,
    directory: Path,
    setting: Setting,
    ckpt_path: str | None = None,
    filename: str = "{step}",
    **of_module: Any,
) -> Outcome:
    seed_everything(7)
    has_logger = setting.loader == "logger"
    saving: list[Callback] = [OnExceptionCheckpoint(directory / "checkpoints", "exception")]
    if has_logger or not setting.saves_on_exception:
        saving.clear()
    if setting.accumulates:
        saving.append(GradientAccumulationScheduler(setting.accumulates))
    options = {"every_n_train_steps": 1, "save_top_k": -1, "save_last": True, **setting.checkpoints}
    saves = ModelCheckpoint(None if has_logger else directory / "checkpoints", filename, **options)
    recorder = Recorder()
    trainer = make_trainer(
        BucketDDPStrategy(auto_resume=True, rank_seeds=True, global_batch_size=setting.global_batch_size),
        max_epochs=setting.num_epochs if "max_steps" not in setting.trainer else None,
        default_root_dir=directory,
        enable_checkpointing=not setting.saves_itself,
        callbacks=[*saving, saves] if setting.saves else saving,
        logger=[CSVLogger(directory, "logs"), TensorBoardLogger(directory, "board")] if has_logger else recorder,
        log_every_n_steps=1,
        use_distributed_sampler=not setting.loader.startswith("own"),
        **{"num_sanity_val_steps": 0, **setting.trainer},
    )
    module = Seeing(setting, interruption, **of_module)
    min_epochs = trainer.fit_loop.min_epochs
    validates = setting.has_plateau or "val_check_interval" in setting.trainer
    loaders = make_loader(setting), DataLoader(Numbers(4)) if validates else None
    logging.captureWarnings(True)
    with lines_logged(rank_zero.log.name, "py.warnings", level=logging.INFO) as lines, workers_allowed():
        try:
            if setting.validates_first:
                trainer.validate(module, DataLoader(Numbers(4)), verbose=False)
            trainer.fit(module, *loaders, ckpt_path=ckpt_path)
        except Interrupted:
            module.outcome.is_interrupted = True
        finally:
            logging.captureWarnings(False)
    assert trainer.fit_loop.min_epochs == min_epochs  # for another fit
    scores = {Path(path).name: float(score) for path, score in saves.best_k_models.items()}
    return replace(
        module.outcome,
        ended_at=trainer.global_step,
        logged=recorder.logged,
        weights=[param.detach().clone() for param in module.parameters()],
        messages=[text for text in lines if any(of in text for of in ("`auto_resume`", "resumable", "begins again"))],
        best=(scores, Path(saves.best_model_path).name, saves.best_model_score),
    )


def start(interruption: Interruption | None = None, **options: Any) -> Outcome:
    """Run a program that fits once."""
    [outcome] = run_program(fits=[interruption], **options)
    return outcome


def interrupt_and_resume(
    *, directory: Path, setting: Setting, interruptions: list[Interruption]
) -> tuple[Outcome, list[Outcome]]:
    """Train without an interruption, and with these; what each start has done."""
    undisturbed = start(directory=directory / "undisturbed", setting=setting)
    starts = [
        start(interruption, directory=directory / "disturbed", setting=setting)
        for interruption in [*interruptions, None]
    ]
    return undisturbed, starts


def joined(starts: list[Outcome]) -> dict[int, list[int]]:
    """The samples of all starts by epoch, in order."""
    seen: dict[int, list[int]] = {}
    for one in starts:
        for epoch, samples in one.seen.items():
            seen.setdefault(epoch, []).extend(samples)
    return seen


# Batches of 2 samples on 2 ranks: 7 in each epoch.
RESUMED = {
    "shuffled": (Setting(saves=True), [Interruption(9), Interruption(9, "on_train_batch_end")]),
    "while accumulating": (Setting(trainer={"accumulate_grad_batches": 2}), [Interruption(1), Interruption(10)]),
    "accumulation schedule": (Setting(accumulates={0: 2, 1: 3}), [Interruption(3), Interruption(12)]),
    "last batches": (
        Setting(num_epochs=3),
        [Interruption(6), Interruption(13, "optimizer_step"), Interruption(14)],
    ),
    # In a hook before the batches of an epoch, which counts the one before them.
    "beginning of an epoch": (Setting(num_epochs=3), [Interruption(6, "on_train_epoch_start"), Interruption(15)]),
    "schedule of steps": (
        Setting(schedule="step"),
        [Interruption(2, "optimizer_step"), Interruption(6, "optimizer_step")],
    ),
    "manual optimization": (Setting(is_manual=True), [Interruption(2, "optimizer_step"), Interruption(9)]),
    "validation": (
        Setting(trainer={"val_check_interval": 3}),
        [Interruption(3), Interruption(9, "optimizer_step")],
    ),
    "two loaders": (Setting("two"), [Interruption(6), Interruption(12)]),
    "own generator": (Setting("own generator"), [Interruption(6, "on_train_batch_end"), Interruption(9)]),
    "workers": (Setting("workers"), [Interruption(9)]),
    # Lightning ends the last epoch once more, and takes the order of samples of the next one but one.
    "number of steps, saved after epochs": (
        Setting(
            saves=True,
            saves_on_exception=False,
            checkpoints={"every_n_train_steps": None, "save_on_train_epoch_end": True},
            has_plateau=True,
            trainer={"max_steps": 21},
            num_epochs=3,
        ),
        [Interruption(7), Interruption(14)],
    ),
}


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.sampled(5)
def test_each_sample_is_trained_on_once_in_each_epoch(name: str, tmp_path: Path) -> None:
    setting, interruptions = RESUMED[name]
    ranks = run_on_ranks(interrupt_and_resume, directory=tmp_path, setting=setting, interruptions=interruptions)
    for undisturbed, starts in ranks:
        assert len(undisturbed.seen) == setting.num_epochs
        assert [one.begun_at for one in starts][1:] != [0] * len(interruptions)
        assert joined(starts) == undisturbed.seen
        # A batch that was interrupted after its step is logged by no start.
        assert set().union(*(one.logged for one in starts)) <= undisturbed.logged
        assert not [text for one in starts for text in one.messages if "not resumable" in text]
        assert starts[-1].ended_at == undisturbed.ended_at
        for ours, theirs in zip(starts[-1].weights, undisturbed.weights, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("global_batch_size", [None, 4])
def test_fewer_ranks_go_on_with_the_samples_that_are_left(global_batch_size: int | None, tmp_path: Path) -> None:
    # 5 batches of 2 samples on 2 ranks: 10 batches of 1 rank.
    setting = Setting(num_epochs=1, global_batch_size=global_batch_size)
    two = run_on_ranks(start, directory=tmp_path, setting=setting, interruption=Interruption(5))
    [one] = run_on_ranks(start, world_size=1, directory=tmp_path, setting=setting)
    seen = [sample for outcome in (*two, one) for sample in outcome.seen[0]]
    assert sorted(seen) == list(range(setting.num_samples))


def test_the_newest_intact_checkpoint_is_taken_whatever_the_clock_says(tmp_path: Path) -> None:
    setting = Setting(saves=True, num_epochs=1)
    run_on_ranks(start, directory=tmp_path, setting=setting, interruption=Interruption(4))
    checkpoints = tmp_path / "checkpoints"
    # Saved in this order: the last one has the oldest time.
    newest_first = [checkpoints / name for name in ("exception.ckpt", "last.ckpt", "step=4.ckpt", "step=3.ckpt")]
    flip_a_bit(checkpoints / "exception.ckpt")
    (checkpoints / "last.ckpt").write_bytes((checkpoints / "step=3.ckpt").read_bytes())
    for age, path in enumerate(newest_first):
        os.utime(path, (1e9 + age, 1e9 + age))
    [first, second] = run_on_ranks(start, directory=tmp_path, setting=setting)
    assert [rank.resumed_from for rank in (first, second)] == ["step=4.ckpt"] * 2
    damaged, replaced, resumed = first.messages
    assert re.search(r"leaves out checkpoint `.*/exception.ckpt` \(step 4, epoch 0\): .* damaged", damaged)
    assert re.search(r"`.*/last.ckpt` \(step 4, epoch 0\): another file has taken its place\.", replaced)
    assert resumed == f"bucketddp: `auto_resume`: resuming from `{checkpoints}/step=4.ckpt` (step 4, epoch 0)."
    assert second.messages == []


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        start_of_record = max(archive.infolist(), key=lambda entry: entry.file_size).header_offset
    content[start_of_record + 200] ^= 1
    path.write_bytes(content)


def start_programs(*, directory: Path) -> dict[str, Outcome]:
    """Start programs that differ in something, in one directory, where the first of them was interrupted."""
    setting = Setting(num_epochs=1, saves=True)
    options: dict[str, Any] = {"directory": directory, "setting": setting, "interruption": Interruption(3)}
    outcomes = {"first": start(**options), "other shapes": start(**options, width=3)}
    outcomes["other hyperparameters"] = start(**options, note="another")
    outcomes["other files"] = start(**options, filename="other-{step}")
    with patch.object(sys, "argv", [*sys.argv, "--another"]):
        outcomes["other arguments"] = start(**options)
    outcomes["path"] = start(**options, ckpt_path=str(directory / "checkpoints" / "step=1.ckpt"))
    # In the same program, after an exception; then as another program, after its end.
    outcomes["retry"] = start(directory=directory, setting=setting, is_new_process=False)
    outcomes["again"] = start(directory=directory, setting=setting)
    return outcomes


def test_only_checkpoints_of_the_same_run_are_taken(tmp_path: Path) -> None:
    outcomes, of_other_rank = run_on_ranks(start_programs, directory=tmp_path)
    begun_at = {name: outcome.begun_at for name, outcome in outcomes.items()}
    assert begun_at == {
        **dict.fromkeys(("first", "other shapes", "other hyperparameters", "other files", "other arguments"), 0),
        "path": 1,
        "retry": 3,
        "again": None,
    }
    assert begun_at == {name: outcome.begun_at for name, outcome in of_other_rank.items()}
    told = {name: outcome.messages[-1].removeprefix("bucketddp: `auto_resume`: ") for name, outcome in outcomes.items()}
    none = f"no checkpoint of this run under `{tmp_path}`"
    assert told["first"] == f"{none}: training begins at the start."
    assert told["other arguments"] == f"{none} (4 other runs left some): training begins at the start."
    assert told["path"] == "`ckpt_path` was given: resuming from there."
    assert re.fullmatch(r"resuming from `.*` \(step 7, epoch 0\), where the run had ended\.", told["again"])


def hyperparameters() -> list[Any]:
    """Made anew: what they hold is the same, and where it is in memory is not."""
    config = OmegaConf.create({"out": "???", "when": "${now}"})
    objects = [nn.Linear(2, 2), nn.functional.relu, nn.ReLU, Path("here"), signal.SIGTERM, {"b", "a"}, config]
    return [{"lr": 0.1, "sizes": (1, 2)}, Namespace(config=Setting(trainer={"a": objects})), None]


def test_hyperparameters_are_compared_by_what_they_hold() -> None:
    assert json.dumps(plain(hyperparameters())) == json.dumps(plain(hyperparameters()))
    others = [{"lr": 0.2}, {"lr": 0.1, "sizes": (1, 3)}, signal.SIGINT, Setting(num_epochs=7), nn.ELU, {"a", "c"}]
    others += [*hyperparameters(), signal.SIGTERM, Setting(), {"b", "a"}, {(0, 1): 2}, {(0, 1): 3}]
    texts = [json.dumps(plain(value)) for value in others]
    assert len(set(texts)) == len(texts)


def test_fits_that_are_alike_are_runs_of_their_own(tmp_path: Path) -> None:
    options: dict[str, Any] = {"directory": tmp_path, "setting": Setting(num_epochs=1, saves=True)}
    [[first, second], _] = run_on_ranks(run_program, fits=[None, Interruption(3), None], **options)
    assert [first.begun_at, second.begun_at] == [0, 0]
    [folds, _] = run_on_ranks(run_program, fits=[None, None, None], **options)
    assert [fold.begun_at for fold in folds] == [None, 3, 0]
    assert torch.equal(folds[0].weights[0], first.weights[0])


def fit_folds(*, directory: Path, folds: dict[str, Interruption | None]) -> list[int | None]:
    """Run a program that fits in a directory for each fold; where each fit has begun."""
    AutoResume.num_fits_ended.clear()
    options: dict[str, Any] = {"setting": Setting("logger", num_epochs=1, saves=True), "is_new_process": False}
    return [start(at, directory=directory / name, **options).begun_at for name, at in folds.items()]


def test_a_fit_in_a_directory_of_its_own_is_known_whatever_the_program_fits_before(tmp_path: Path) -> None:
    [begun_at, _] = run_on_ranks(fit_folds, directory=tmp_path, folds={"1": None, "2": Interruption(3), "3": None})
    assert begun_at == [0, 0, 0]
    # Folds that are complete are left out, as a program may do that is started again; or none is.
    [begun_at, _] = run_on_ranks(fit_folds, directory=tmp_path, folds={"2": Interruption(5)})
    assert begun_at == [3]
    [begun_at, _] = run_on_ranks(fit_folds, directory=tmp_path, folds={"1": None, "2": None, "3": None})
    assert begun_at == [None, 5, None]


def test_metrics_that_a_full_disk_left_empty_are_written_to(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    path = Path(logger.log_dir) / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.touch()
    _reopen_csv(logger)
    logger.log_metrics({"score": 1.0}, step=3)
    logger.save()
    assert sorted(path.read_text().splitlines()[0].split(",")) == ["score", "step"]
    assert len(path.read_text().splitlines()) == 2


def test_a_validation_before_the_fit_makes_no_other_run_of_it(tmp_path: Path) -> None:
    """Lightning gives a `ModelCheckpoint` the directory of its logger's version in a validation, too."""
    setting = Setting("logger", num_epochs=1, saves=True, validates_first=True)
    ranks = run_on_ranks(interrupt_and_resume, directory=tmp_path, setting=setting, interruptions=[Interruption(3)])
    for undisturbed, [_, resumed] in ranks:
        assert resumed.begun_at == 3
        assert torch.equal(resumed.weights[0], undisturbed.weights[0])


def test_a_resumed_run_goes_on_in_its_directory_and_knows_its_best_checkpoints(tmp_path: Path) -> None:
    # The third step is the newest that is saved when the run is interrupted, and is to be removed later.
    scores = [5.0, 1.0, 4.0, 6.0, 2.0, 7.0, 3.0]
    of_best = {"monitor": "score", "save_top_k": 2, "save_last": None}
    setting = Setting("logger", num_epochs=1, saves=True, checkpoints=of_best, scores=scores)
    ranks = run_on_ranks(interrupt_and_resume, directory=tmp_path, setting=setting, interruptions=[Interruption(4)])
    for undisturbed, [_, resumed] in ranks:
        assert (resumed.begun_at, resumed.best) == (3, undisturbed.best)
        assert resumed.best == ({"step=2.ckpt": 1.0, "step=5.ckpt": 2.0}, "step=2.ckpt", 1.0)
    for run in (tmp_path / "undisturbed", tmp_path / "disturbed"):
        assert [path.name for name in ("logs", "board") for path in (run / name).iterdir()] == ["version_0"] * 2
        files = (run / "logs" / "version_0" / "checkpoints").iterdir()
        assert sorted(path.name for path in files) == ["step=2.ckpt", "step=5.ckpt"]
    rows = (tmp_path / "disturbed" / "logs" / "version_0" / "metrics.csv").read_text().splitlines()
    # The fourth step, which was lost, is there twice.
    assert [float(row.split(",")[rows[0].split(",").index("score")]) for row in rows[1:]] == [*scores[:4], *scores[3:]]


@pytest.mark.parametrize(
    ("setting", "newest"),
    [
        pytest.param(Setting(trainer={"max_steps": 12}, checkpoints={"every_n_train_steps": 5}), 10, id="number"),
        pytest.param(
            Setting(
                trainer={"min_epochs": 2},
                checkpoints={"monitor": "score", "save_top_k": 1, "save_last": None},
                scores=[2.0, 1.0, *[3.0] * 19],
            ),
            2,
            id="best",
        ),
    ],
)
def test_a_run_that_has_ended_after_its_newest_checkpoint_trains_nothing(
    setting: Setting, newest: int, tmp_path: Path
) -> None:
    setting = replace(setting, saves=True)
    [first, _] = run_on_ranks(start, directory=tmp_path, setting=setting)
    ranks = run_on_ranks(start, directory=tmp_path, setting=setting)
    if "max_steps" in setting.trainer and not RequirementCache("lightning>=2.6"):
        newest = first.ended_at  # it saves at the end of training, too
    assert [(rank.begun_at, rank.seen, rank.ended_at) for rank in ranks] == [(None, {}, newest)] * 2
    ended = f"The run had ended at step {first.ended_at}: nothing is trained."
    assert ranks[0].messages[-1].endswith("where the run had ended." if newest == first.ended_at else ended)
    limits = {"max_steps": first.ended_at + 1} if "max_steps" in setting.trainer else {}
    longer = replace(setting, trainer={**setting.trainer, **limits}, num_epochs=3)
    [more, _] = run_on_ranks(start, directory=tmp_path, setting=longer)
    assert (more.begun_at, more.ended_at > first.ended_at) == (newest, True)


def test_a_run_that_a_callback_has_stopped_stays_stopped(tmp_path: Path) -> None:
    options: dict[str, Any] = {"directory": tmp_path, "setting": Setting(saves=True, stops=True)}
    [first, _] = run_on_ranks(start, **options)
    [again, _] = run_on_ranks(start, **options)
    assert (first.begun_at, len(first.seen), again.begun_at) == (0, 1, None)
    assert torch.equal(again.weights[0], first.weights[0])


@on_ranks(1)
@like_torchrun()
def test_a_search_while_resuming_is_refused(tmp_path: Path) -> None:
    finder = LearningRateFinder()
    trainer = make_trainer(BucketDDPStrategy(auto_resume=True), default_root_dir=tmp_path, callbacks=finder)
    text = "^`auto_resume=True` and the callback `LearningRateFinder` do not go together: it searches"
    with pytest.raises(ValueError, match=text):
        trainer.fit(Seeing(Setting(), None), make_loader(Setting()))


def test_batches_of_the_users_own_that_change_begin_again_and_say_so(tmp_path: Path) -> None:
    def start_alone(batch_size: int, interruption: Interruption | None) -> tuple[list[int], list[str]]:
        setting = Setting("own batches", num_samples=24, batch_size=batch_size, num_epochs=1)
        [rank] = run_on_ranks(start, world_size=1, setting=setting, interruption=interruption, directory=tmp_path)
        return rank.seen[0], [text for text in rank.messages if "begins again" in text]

    start_alone(2, Interruption(3, "this start"))
    seen, told = start_alone(2, Interruption(5, "this start"))
    assert (len(seen), told) == (10, [])  # with batches that are the same it goes on
    seen, [told_once] = start_alone(4, None)
    assert sorted(seen) == list(range(24))
    assert "bucketddp: the data of this epoch begins again. Which samples are in" in told_once


SAVES_ALONE: dict[str, Any] = {"saves": True, "saves_on_exception": False}
EACH = {"every_n_train_steps": None, "save_last": None}


@pytest.mark.parametrize(
    "saving",
    [
        pytest.param({}, id="on exception"),
        pytest.param({**SAVES_ALONE, "checkpoints": {**EACH, "save_on_train_epoch_end": False}}, id="after validation"),
        pytest.param({**SAVES_ALONE, "checkpoints": {**EACH, "save_on_train_epoch_end": True}}, id="after epochs"),
    ],
)
def test_a_run_that_is_interrupted_in_each_epoch_lowers_its_rate(saving: dict[str, Any], tmp_path: Path) -> None:
    setting = Setting(num_samples=24, batch_size=6, has_plateau=True, num_epochs=3, **saving)

    def rates_of_start(place: str, interruption: Interruption | None = None) -> list[float]:
        options: dict[str, Any] = {"interruption": interruption, "directory": tmp_path / place}
        [outcome] = run_on_ranks(start, world_size=1, setting=setting, **options)
        rates: list[float] = outcome.rates
        return rates

    assert rates_of_start("undisturbed") == pytest.approx([0.1, 0.1, 0.01])
    # 4 batches in each epoch: the middle of the first, and of the next ones.
    for num_batches in (6, 6) if saving else (2, 4):
        rates_of_start("disturbed", Interruption(num_batches, "this start"))
    assert rates_of_start("disturbed")[-1] == pytest.approx(0.01)


def test_a_schedule_that_follows_the_loss_of_training_does_without_it_after_the_last_validation(tmp_path: Path) -> None:
    saves = {**SAVES_ALONE, "checkpoints": {**EACH, "save_on_train_epoch_end": False}}
    setting = Setting(has_plateau=True, follows="of training", **saves)
    ranks = run_on_ranks(interrupt_and_resume, directory=tmp_path, setting=setting, interruptions=[Interruption(7)])
    for undisturbed, [_, resumed] in ranks:
        assert resumed.begun_at == 7
        assert resumed.seen == {1: undisturbed.seen[1]}


def test_a_schedule_that_follows_the_loss_of_training_gets_that_of_the_epoch(tmp_path: Path) -> None:
    saves: dict[str, Any] = {"saves_itself": True, "saves_on_exception": False}
    setting = Setting(has_plateau=True, follows="of training", num_epochs=3, **saves)
    ranks = run_on_ranks(interrupt_and_resume, directory=tmp_path, setting=setting, interruptions=[Interruption(15)])
    for undisturbed, [_, resumed] in ranks:
        assert resumed.begun_at == 14
        assert all(map(torch.equal, resumed.weights, undisturbed.weights))


class Growing(LightningModule):
    """Has more batches in each epoch, and writes down after which steps it validates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.validated: list[int] = []

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(8 + 2 * self.trainer.current_epoch, 1)))

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(1, 1)))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.layer(batch[0]).square().mean()
        return loss

    def validation_step(self, _: list[Tensor]) -> None:
        self.validated.append(self.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@on_ranks(1)
@like_torchrun()
def test_validations_keep_their_distance_where_an_epoch_has_more_batches_than_the_one_before(tmp_path: Path) -> None:
    validated = []
    for num_epochs in (1, 3):
        module = Growing()
        trainer = make_trainer(
            BucketDDPStrategy(auto_resume=True),
            max_epochs=num_epochs,
            reload_dataloaders_every_n_epochs=1,
            num_sanity_val_steps=0,
            check_val_every_n_epoch=None,
            val_check_interval=7,
            enable_checkpointing=True,
            callbacks=ModelCheckpoint(tmp_path, save_on_train_epoch_end=True),
            default_root_dir=tmp_path,
        )
        AutoResume.num_fits_ended.clear()  # as a new process
        trainer.fit(module)
        validated += module.validated
    assert validated == [7, 14, 21, 28]
