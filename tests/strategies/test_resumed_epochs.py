"""A run that is interrupted within an epoch ends it with the samples that are left, and its schedules go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.test_auto_resume import Interruption, Outcome, Setting, start
from tests.support.ranks import run_on_ranks


def after(num_batches: int) -> Interruption:
    return Interruption(num_batches, "this start")


def of(batch_size: int, **options: Any) -> Setting:
    return Setting(batch_size=batch_size, num_samples=24, num_epochs=1, **options)


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param([(of(2), after(2)), (of(4), None)], id="larger"),
        pytest.param([(of(4), after(2)), (of(3), None)], id="smaller"),
        pytest.param([(of(1), after(5)), (of(4), after(1)), (of(2), None)], id="twice"),
        pytest.param([(of(2, global_batch_size=4), after(2)), (of(4, global_batch_size=10), None)], id="global"),
        pytest.param([(of(2, loader="stream"), after(2)), (of(5, loader="stream"), None)], id="stream"),
    ],
)
def test_a_batch_size_that_changes_leaves_out_no_sample_and_repeats_none(starts: Any, tmp_path: Path) -> None:
    seen = [
        sample
        for setting, interruption in starts
        for rank in run_on_ranks(start, setting=setting, interruption=interruption, directory=tmp_path)
        for sample in rank.seen[0]
    ]
    assert sorted(seen) == list(range(24))


def test_batches_of_the_users_own_that_change_begin_again_and_say_so(tmp_path: Path) -> None:
    def start_alone(batch_size: int, interruption: Interruption | None) -> tuple[list[int], list[str]]:
        setting = of(batch_size, loader="own batches")
        [rank] = run_on_ranks(start, world_size=1, setting=setting, interruption=interruption, directory=tmp_path)
        return rank.seen[0], [text for text in rank.messages if "begins again" in text]

    start_alone(2, after(3))
    seen, told = start_alone(2, after(5))
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
    setting = replace(of(6, has_plateau=True, **saving), num_epochs=3)

    def start_alone(place: str, interruption: Interruption | None = None) -> list[float]:
        outcome: Outcome
        [outcome] = run_on_ranks(
            start, world_size=1, setting=setting, interruption=interruption, directory=tmp_path / place
        )
        return outcome.rates

    assert start_alone("undisturbed") == pytest.approx([0.1, 0.1, 0.01])
    # 4 batches in each epoch: the middle of the first, and of the next ones.
    for num_batches in (6, 6) if saving else (2, 4):
        start_alone("disturbed", after(num_batches))
    assert start_alone("disturbed")[-1] == pytest.approx(0.01)
