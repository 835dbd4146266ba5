"""`auto_resume`: a program that is started again goes on by itself, from its own newest checkpoint that is intact."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import zipfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from omegaconf import OmegaConf
from torch import nn

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.strategies.auto_resume import plain
from tests.support.ranks import run_on_ranks
from tests.support.scripts.resuming import (
    Interruption,
    Outcome,
    Seeing,
    Setting,
    interrupt_and_resume,
    make_loader,
    run_program,
    start,
)
from tests.support.scripts.trainers import like_torchrun, make_trainer


def joined(starts: list[Outcome]) -> dict[int, list[int]]:
    """The samples of all starts by epoch, in order."""
    seen: dict[int, list[int]] = {}
    for one in starts:
        for epoch, samples in one.seen.items():
            seen.setdefault(epoch, []).extend(samples)
    return seen


# Batches of 2 samples on 2 ranks: 7 in each epoch.
@pytest.mark.parametrize(
    ("setting", "interruptions"),
    [
        pytest.param(Setting(saves=True), [Interruption(9), Interruption(9, "on_train_batch_end")], id="shuffled"),
        pytest.param(Setting(accumulate=2), [Interruption(1), Interruption(10)], id="while accumulating"),
        pytest.param(
            Setting(),
            [Interruption(2, "optimizer_step"), Interruption(9, "on_train_batch_end")],
            id="after the step",
        ),
        pytest.param(
            Setting(num_epochs=3),
            [Interruption(6), Interruption(13, "optimizer_step"), Interruption(14)],
            id="last batches",
        ),
        pytest.param(Setting("workers", plans=True), [Interruption(9)], id="workers", marks=pytest.mark.long),
        pytest.param(
            Setting(is_manual=True), [Interruption(2, "optimizer_step"), Interruption(9)], id="manual optimization"
        ),
        pytest.param(
            Setting(trainer={"max_steps": 14}),
            [Interruption(6, "on_train_batch_end"), Interruption(8), Interruption(10)],
            id="number of steps",
            marks=pytest.mark.long,
        ),
        pytest.param(
            Setting(trainer={"val_check_interval": 3, "num_sanity_val_steps": 0}),
            [Interruption(3), Interruption(9, "optimizer_step")],
            id="validation",
        ),
        pytest.param(Setting("single"), [Interruption(20)], id="without batches"),
        pytest.param(Setting("batch sampler"), [Interruption(9)], id="batch sampler"),
        pytest.param(Setting("two"), [Interruption(6), Interruption(12)], id="two loaders"),
        pytest.param(Setting("two, no cycle"), [Interruption(13)], id="two loaders that end"),
        pytest.param(Setting("own sampler"), [Interruption(20)], id="random sampler of each rank"),
        pytest.param(Setting("in order", num_samples=27), [Interruption(9)], id="padded", marks=pytest.mark.long),
        pytest.param(Setting(num_samples=26, global_batch_size=8), [Interruption(5)], id="global batch"),
    ],
)
@pytest.mark.sampled(5)
def test_each_sample_is_trained_on_once_in_each_epoch(
    setting: Setting, interruptions: list[Interruption], tmp_path: Path
) -> None:
    ranks = run_on_ranks(
        interrupt_and_resume, directory=tmp_path, setting=setting, interruptions=interruptions, timeout_s=120
    )
    for undisturbed, starts in ranks:
        assert len(undisturbed.seen) == setting.num_epochs
        assert [one.begun_at for one in starts][1:] != [0] * len(interruptions)
        assert joined(starts) == undisturbed.seen
        assert not [text for one in starts for text in one.messages if "not resumable" in text]
        assert starts[-1].ended_at == undisturbed.ended_at
        for ours, theirs in zip(starts[-1].weights, undisturbed.weights, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "setting",
    [
        # 5 batches of 2 samples on 2 ranks: 10 batches of 1 rank.
        pytest.param(Setting(num_epochs=1), id="batch size of a rank"),
        pytest.param(Setting(num_epochs=1, global_batch_size=4), id="global batch size"),
    ],
)
def test_fewer_ranks_go_on_with_the_samples_that_are_left(setting: Setting, tmp_path: Path) -> None:
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
    texts = [json.dumps(plain(value)) for value in (*others, *hyperparameters(), signal.SIGTERM, Setting(), {"b", "a"})]
    assert len(set(texts)) == len(texts)


def test_fits_that_are_alike_are_runs_of_their_own(tmp_path: Path) -> None:
    options: dict[str, Any] = {"directory": tmp_path, "setting": Setting(num_epochs=1, saves=True)}
    [[first, second], _] = run_on_ranks(run_folds, interruptions=[None, Interruption(3), None], **options)
    assert [first.begun_at, second.begun_at] == [0, 0]
    [folds, _] = run_on_ranks(run_folds, interruptions=[None, None, None], **options)
    assert [fold.begun_at for fold in folds] == [None, 3, 0]
    assert torch.equal(folds[0].weights[0], first.weights[0])


def run_folds(*, interruptions: list[Interruption | None], **options: Any) -> list[Outcome]:
    return run_program(*interruptions, **options)


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
    assert [(rank.begun_at, rank.seen, rank.ended_at) for rank in ranks] == [(None, {}, newest)] * 2
    assert ranks[0].messages[-1].endswith(f"The run had ended at step {first.ended_at}: nothing is trained.")
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


@like_torchrun()
def fit_with_a_finder(*, directory: Path) -> str:
    trainer = make_trainer(
        BucketDDPStrategy(auto_resume=True), default_root_dir=directory, callbacks=LearningRateFinder()
    )
    with pytest.raises(ValueError, match="do not go together") as raised:
        trainer.fit(Seeing(Setting(), None), make_loader(Setting()))
    return str(raised.value)


def test_a_search_while_resuming_is_refused(tmp_path: Path) -> None:
    [text] = run_on_ranks(fit_with_a_finder, world_size=1, directory=tmp_path)
    assert text.startswith("`auto_resume=True` and the callback `LearningRateFinder` do not go together: it searches")
