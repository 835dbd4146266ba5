"""`ScalingMonitor`: what it measures, what it leaves out, and what it does not pretend to know."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_bucketddp.bindings.trainer_lightning import ScalingMonitor
from tests.support.ranks import run_on_ranks
from tests.support.scripts.throughput import measure


@pytest.mark.parametrize(("strategy", "limit_val_batches"), [("bucketddp", 1), ("bucketddp", 0), ("ddp", 1)])
def test_throughput_is_that_of_all_ranks_and_of_training_alone(
    strategy: str, limit_val_batches: int, tmp_path: Path
) -> None:
    # Twice four samples in each second of training; validation and the start of an epoch take a hundred.
    rank_zero, _ = run_on_ranks(
        measure, strategy=strategy, directory=tmp_path, log_every_n_steps=5, limit_val_batches=limit_val_batches
    )
    assert rank_zero.logged == {step: {"global_batch_size": 8, "samples_per_second": 8} for step in (4, 9, 14, 19)}


def test_the_device_is_waited_for_at_log_points_and_where_measuring_begins(tmp_path: Path) -> None:
    for rank in run_on_ranks(measure, directory=tmp_path, log_every_n_steps=5):
        assert rank.num_readings == 4 + 2


def test_accumulated_batches_are_one_global_batch(tmp_path: Path) -> None:
    rank_zero, _ = run_on_ranks(measure, directory=tmp_path, log_every_n_steps=2, accumulate_grad_batches=2)
    # Five steps in an epoch; the sixth, which begins the second, is not measured.
    assert set(rank_zero.logged) == {1, 3, 7, 9}
    for values in rank_zero.logged.values():
        assert values == {"global_batch_size": 16, "samples_per_second": 8}


def test_checkpoints_and_validation_within_an_epoch_are_left_out(tmp_path: Path) -> None:
    rank_zero, _ = run_on_ranks(
        measure, directory=tmp_path, log_every_n_steps=2, save_every=5, val_check_interval=3, limit_val_batches=1
    )
    assert {values["samples_per_second"] for values in rank_zero.logged.values()} == {8}


def test_nothing_is_logged_where_nothing_was_measured(tmp_path: Path) -> None:
    # The checkpoint after step 9 ends what was measured; step 10 begins anew, and the value of step 5 is not repeated.
    rank_zero, _ = run_on_ranks(measure, directory=tmp_path, log_every_n_steps=5, save_every=9)
    assert set(rank_zero.logged) == {4, 14, 19}


def test_a_short_last_batch_counts_as_what_it_is(tmp_path: Path) -> None:
    # 40 samples per rank in batches of 3: 13 and a rest of 1.
    rank_zero, _ = run_on_ranks(measure, directory=tmp_path, batch_size=3, log_every_n_steps=7)
    rates = [values["samples_per_second"] for values in rank_zero.logged.values()]
    assert rates == pytest.approx([6, (6 * 6 + 2) / 7] * 2)


def test_a_last_batch_of_unknown_size_is_not_guessed(tmp_path: Path) -> None:
    rank_zero, _ = run_on_ranks(measure, directory=tmp_path, streams=True, batch_size=2, log_every_n_steps=1)
    # Three batches in an epoch: the first begins, the second is measured.
    assert rank_zero.logged == {step: {"global_batch_size": 4, "samples_per_second": 4} for step in (1, 4)}


def test_efficiency_is_throughput_by_that_of_as_many_single_ranks(tmp_path: Path) -> None:
    rank_zero, _ = run_on_ranks(
        measure, directory=tmp_path, monitor={"single_rank_samples_per_second": 5}, log_every_n_steps=5
    )
    assert {values["scaling_efficiency"] for values in rank_zero.logged.values()} == {0.8}
    assert rank_zero.lines == ["ScalingMonitor: 2 rank(s): 8 samples per second. Scaling efficiency 0.800."]


def test_a_single_rank_says_what_to_pass_to_more(tmp_path: Path) -> None:
    [alone] = run_on_ranks(measure, world_size=1, directory=tmp_path, strategy="auto", log_every_n_steps=5)
    assert alone.lines == [
        "ScalingMonitor: 1 rank(s): 4 samples per second. Pass `single_rank_samples_per_second=4` when you train on"
        " more ranks."
    ]
    assert alone.logged[4] == {"global_batch_size": 4, "samples_per_second": 4}


def test_a_given_batch_size_counts(tmp_path: Path) -> None:
    rank_zero, _ = run_on_ranks(
        measure, directory=tmp_path, monitor={"batch_size_per_rank": 10}, batch_size=3, log_every_n_steps=7
    )
    assert {values["samples_per_second"] for values in rank_zero.logged.values()} == {20}


def test_a_throughput_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`single_rank_samples_per_second` is 0; it must be more than 0\."):
        ScalingMonitor(single_rank_samples_per_second=0)
