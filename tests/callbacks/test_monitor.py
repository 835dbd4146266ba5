"""`BucketDDPMonitor`: what it records, logs and says, and that training does not notice."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPMonitor
from lightning_bucketddp.commands.report import page_content
from lightning_bucketddp.config import MIB
from lightning_bucketddp.recording.schema import FOLDER, RecordedPlan, Run, Step, path_of, read, read_run
from lightning_bucketddp.recording.writer import metrics_of
from lightning_bucketddp.reducer.observer import Clock
from tests.recording.test_step_recorder import assert_ends_agree
from tests.support.jobs.recording import assert_in_order
from tests.support.ranks import on_ranks, raised_by, run_on_ranks
from tests.support.scripts import models
from tests.support.scripts.monitored import Fitted, fit, logged_in_csv
from tests.support.scripts.trainers import like_torchrun, lines_logged, make_trainer

EVERY = {"every_n_steps": 1}
NAMES = ["data", "forward", "backward", "exposed", "optimizer"]


def lines_of(directory: Path, rank: int, kind: type) -> list[Any]:
    return [line for line in read(path_of(directory / FOLDER, rank)) if isinstance(line, kind)]


def steps_of(directory: Path, rank: int = 0) -> list[Step]:
    return lines_of(directory, rank, Step)


def test_steps_are_recorded_on_every_rank(tmp_path: Path) -> None:
    ranks = run_on_ranks(fit, directory=tmp_path, monitor=EVERY, val_check_interval=2, save_every=3)
    by_rank = [steps_of(tmp_path, rank) for rank in range(2)]
    for rank, steps in enumerate(by_rank):
        assert [step.step for step in steps] == list(range(10))
        [run], [plan] = lines_of(tmp_path, rank, Run), lines_of(tmp_path, rank, RecordedPlan)
        assert (run.rank, run.world_size, run.num_parameters, run.gradient_bytes) == (rank, 2, 49, 196)
        assert (run.backend, run.options["accumulate_grad_batches"], run.options["num_workers"]) == ("gloo", 1, 0)
        assert all(run.codecs[name].encode_s_per_byte > 0 for name in ("bf16", "int8"))
        assert sorted(name for bucket in plan.buckets for name in bucket.parameters) == [
            f"layers.{layer}.{name}" for layer in (0, 2) for name in ("bias", "weight")
        ]
        assert plan.version == 1
        for step in steps:
            assert_in_order(step)
            assert list(dict.fromkeys(span.name for span in step.spans)) == NAMES
            assert (len(step.buckets), step.plan) == (len(plan.buckets), 1)
            assert step.memory_bytes > 0
        assert all(one.end_s <= next_one.start_s for one, next_one in pairwise(steps))
    for steps_at_once in zip(*by_rank, strict=True):
        assert_ends_agree(list(steps_at_once))
    # Validation, checkpoints and other callbacks are no part of a step.
    for rank, fitted in enumerate(ranks):
        assert len(fitted.times_between) > 10
        assert_nothing_between_is_recorded(fitted, by_rank[rank])
        assert not fitted.left_on_loop
        assert fitted.in_progress_bar is None


def assert_nothing_between_is_recorded(fitted: Fitted, steps: list[Step]) -> None:
    spans = [span for step in steps for span in step.spans]
    for start, end in fitted.times_between:
        assert not any(span.start_s < end and start < span.end_s for span in spans)


def test_sharding_is_recorded_and_the_summary_says_what_it_saves(tmp_path: Path) -> None:
    common: dict[str, Any] = {"model": "wide", "limit_train_batches": 6, "about": "optimizer state divided"}
    whole, _ = run_on_ranks(fit, directory=tmp_path / "whole", **common)
    common["options"] = {"shard_optimizer": True}
    ranks = run_on_ranks(fit, directory=tmp_path, monitor={"every_n_steps": 2}, **common)
    for rank in range(2):
        [plan], steps = lines_of(tmp_path, rank, RecordedPlan), steps_of(tmp_path, rank)
        assert all(bucket.sharded for bucket in plan.buckets)
        assert [step.step for step in steps] == [1, 3, 5]
        for step in steps:
            assert_in_order(step)
            assert sorted(gather.bucket for gather in step.gathers) == list(range(len(plan.buckets)))
            assert "weights" in [span.name for span in step.spans]
            # Gloo reduces all gradients everywhere, and then weights travel, too.
            assert step.bytes_on_wire > 1.49 * lines_of(tmp_path, rank, Run)[0].gradient_bytes
    own, all_of_it = ranks[0].state_bytes / MIB, whole.state_bytes / MIB
    assert ranks[0].state_bytes + ranks[1].state_bytes == pytest.approx(whole.state_bytes, abs=64)
    [line] = ranks[0].said
    assert line.endswith(f"; optimizer state divided among 2 ranks: {own:.1f} MiB here instead of {all_of_it:.1f} MiB.")
    assert (ranks[1].said, whole.said) == ([], [])
    assert (
        f"Optimizer state: {own:.2f} MiB on rank 0, {all_of_it:.2f} MiB without `shard_optimizer`." in ranks[0].printed
    )
    assert "│ waiting for weights " in ranks[0].printed
    typical = page_content(read_run(tmp_path / FOLDER))["typical"]
    [said] = re.findall(r"Weights: .* takes ([\d.]+) ms of that; the step waits ([\d.]+) ms", ranks[0].printed)
    assert [float(ms) for ms in said] == pytest.approx([typical["exchange"], typical["phases"]["weights"]], abs=0.006)


@pytest.mark.parametrize(
    ("model", "trainer_options", "forwards", "steps"),
    [
        ("regression", {"accumulate_grad_batches": 4}, [4, 4, 2], [0, 1, 2]),
        ("two_players", {}, [2] * 20, list(range(20))),  # before and after a backward
        ("lbfgs", {"limit_train_batches": 3}, None, [0, 1, 2]),
    ],
)
def test_training_does_not_notice(
    model: str, trainer_options: dict[str, Any], forwards: list[int] | None, steps: list[int], tmp_path: Path
) -> None:
    plain = run_on_ranks(fit, directory=tmp_path / "plain", model=model, **trainer_options)
    monitored = run_on_ranks(fit, directory=tmp_path, model=model, monitor=EVERY, **trainer_options)
    for one, other in zip(plain, monitored, strict=True):
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    recorded = steps_of(tmp_path)
    assert [step.step for step in recorded] == steps
    for step in recorded:
        assert_in_order(step)
        assert step.buckets
        assert step.spans[-1].name == "optimizer"
    if forwards is not None:
        assert [Counter(span.name for span in step.spans)["forward"] for step in recorded] == forwards
    if model == "two_players":
        # Each has its own plan, and all its steps use it.
        assert [plan.version for plan in lines_of(tmp_path, 0, RecordedPlan)] == [1, 2]
        assert [step.plan for step in recorded] == [1, 2] * 10


def fit_with_a_lagging_device(**options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clock, "wait", lambda self, mark: 0.25)
        return fit(**options)


def test_the_lag_of_a_device_is_measured_ever_less_often(tmp_path: Path) -> None:
    run_on_ranks(fit_with_a_lagging_device, directory=tmp_path, monitor=EVERY)
    lags = [step.lag_s for step in steps_of(tmp_path)][:10]
    assert lags == [0.25, 0.25, None, 0.25, None, None, None, 0.25, None, None]


def test_values_are_logged_as_means_over_what_was_recorded(tmp_path: Path) -> None:
    run_on_ranks(fit, directory=tmp_path, monitor={"every_n_steps": 2}, loggers=True, log_every_n_steps=4)
    # The folder is where the first logger writes.
    steps = steps_of(tmp_path / "csv" / "0")
    assert [step.step for step in steps] == [1, 3, 5, 7, 9]
    logged = logged_in_csv(tmp_path)
    # At the end what is left.
    assert list(logged) == [3, 7, 10]
    for values, of in zip(logged.values(), (steps[:2], steps[2:4], steps[4:]), strict=True):
        assert values == pytest.approx(metrics_of(of, num_ranks=2))
        assert (values["buckets"], values["plan_version"], values["unused_parameters"]) == (3, 1, 0)
        assert values["mb_on_wire"] > 0
    accumulator = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "0")).Reload()
    for name, value in logged[7].items():
        assert [(e.step, e.value) for e in events.Scalars(f"bucketddp/{name}")][1] == (7, pytest.approx(value))


@pytest.mark.parametrize(("model", "of_a_step"), [("unused", (2.0, 0.0)), ("skipping", (0.0, 0.5))])
def test_unused_parameters_and_skipped_batches_are_counted(
    model: str, of_a_step: tuple[float, float], tmp_path: Path
) -> None:
    run_on_ranks(fit, directory=tmp_path, model=model, monitor=EVERY, loggers=True, log_every_n_steps=10)
    [values] = logged_in_csv(tmp_path).values()
    assert (values["unused_parameters"], values["skipped_batches_per_step"]) == of_a_step


def test_the_slow_rank_is_named_and_only_rank_zero_says_so(tmp_path: Path) -> None:
    rank_zero, rank_one = run_on_ranks(fit, directory=tmp_path, model="slow_rank", monitor=EVERY)
    phases = [
        f"│ {name} " for name in ("waiting for data", "forward", "backward", "exposed communication", "optimizer")
    ]
    said = ["10 recorded steps on 2 ranks", "Slowest rank: 1 on ", "Suggestion 1: rank 1 on ", "most of it in forward"]
    for text in [*phases, *said, "Late bucket: ", "Memory: "]:
        assert text in rank_zero.printed
    assert rank_one.printed == ""
    # The page of the run says the same.
    content = page_content(read_run(tmp_path / FOLDER))
    step = content["typical"]
    printed_ms = [float(ms) for ms in re.findall(r"│ +([\d.]+) │ +[\d.]+ │", rank_zero.printed)]
    assert printed_ms == pytest.approx([*step["phases"].values(), step["step"]], abs=0.006)  # rounded twice
    assert list(step["phases"]) == NAMES
    assert content["ranks"][step["straggler"]]["rank"] == 1
    for pattern, expected in (
        (r"Communication: ([\d.]+) ms", step["communication"]),
        (r"Slowest rank: 1 on .*, ([\d.]+) ms \(", step["stragglerBy"]),
        (r"It waits ([\d.]+) ms, for the network alone\.", content["ranks"][1]["exposed"]),
        (r" of the ([\d.]+) ms exposed are spent on it\.", step["phases"]["exposed"]),
    ):
        [ms] = re.findall(pattern, rank_zero.printed)
        assert float(ms) == pytest.approx(expected, abs=0.006)
    for number, text in enumerate(content["suggestions"], start=1):
        assert f"Suggestion {number}: {text}\n" in rank_zero.printed
    # Rank 0 waits from the end of its own backward on, before rank 1 has begun its own.
    by_rank = [statistics.median(step.exposed_s for step in steps_of(tmp_path, rank)) for rank in range(2)]
    assert by_rank[0] > max(0.015, by_rank[1])


def test_nothing_is_done_in_steps_that_are_not_recorded(tmp_path: Path) -> None:
    fitted = run_on_ranks(fit, directory=tmp_path, monitor={"every_n_steps": 11}, max_epochs=1)
    for rank in fitted:
        # Time begins with a mark; then ranks have reduced six times in two sizes or more, with three dtypes.
        rounds, rest = divmod(rank.num_marks - 1, 2 * 6)
        assert (rest, 6 <= rounds <= 9) == (0, True)
    assert fitted[0].said == [
        "BucketDDPMonitor: the fit was too short, no step was recorded. Pass a smaller `every_n_steps`."
    ]
    assert steps_of(tmp_path) == []
    assert fitted[0].printed == ""


def test_a_long_run_is_thinned_and_logged_all_the_same(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "thin_after": 4, "loggers": True, "log_every_n_steps": 1}
    rank_zero, _ = run_on_ranks(fit, directory=tmp_path, monitor=EVERY, **options)
    steps = [[step.step for step in steps_of(tmp_path / "csv" / "0", rank)] for rank in range(2)]
    assert steps[0] == steps[1] == [0, 1, 2, 3, 5, 7, 9, 11, 15, 19, 23, 27]
    assert list(logged_in_csv(tmp_path)) == list(range(30))
    # The summary is of those that can be read again.
    assert "bucketddp: 12 recorded steps on 2 ranks" in rank_zero.printed


def test_a_rank_alone_has_no_buckets(tmp_path: Path) -> None:
    [alone] = run_on_ranks(fit, world_size=1, directory=tmp_path, monitor=EVERY, loggers=True, log_every_n_steps=20)
    [values] = logged_in_csv(tmp_path).values()
    assert {values.pop(name) for name in ("step_ms", "overlap_pct")} > {100}
    assert set(values.values()) == {0}
    assert "bucketddp: 20 recorded steps on 1 rank\n" in alone.printed
    assert "Slowest" not in alone.printed
    assert "Communication" not in alone.printed


def test_a_resumed_run_equals_one_without_monitor_and_a_second_fit_begins_anew(tmp_path: Path) -> None:
    plain = run_on_ranks(fit, directory=tmp_path, save_every=5, max_epochs=2)
    options: dict[str, Any] = {"resume_from": tmp_path / "step=10.ckpt", "max_epochs": 2}
    for rank, expected in zip(run_on_ranks(fit, directory=tmp_path, monitor=EVERY, **options), plain, strict=True):
        assert all(torch.equal(rank.weights[name], expected.weights[name]) for name in rank.weights)
    assert [step.step for step in steps_of(tmp_path)] == list(range(10, 20))
    for rank in run_on_ranks(fit, directory=tmp_path, monitor=EVERY, num_fits=2):
        assert rank.printed.count("10 recorded steps") in (0, 2)
    for number in range(2):
        assert [step.step for step in steps_of(tmp_path, number)] == list(range(10, 20))


def test_what_was_recorded_before_an_accident_is_kept(tmp_path: Path) -> None:
    for rank in run_on_ranks(fit, directory=tmp_path, model="failing", monitor=EVERY):
        assert rank.printed == ""
        assert not rank.left_on_loop
    for rank in range(2):
        assert [step.step for step in steps_of(tmp_path, rank)] == list(range(5))


def test_a_quick_trial_leaves_no_file(tmp_path: Path) -> None:
    rank_zero, _ = run_on_ranks(fit, directory=tmp_path, monitor=EVERY, fast_dev_run=2)
    assert "2 recorded steps" in rank_zero.printed
    assert not (tmp_path / FOLDER).exists()


def test_the_progress_bar_shows_overlap(tmp_path: Path) -> None:
    monitor = {"every_n_steps": 9, "progress_bar": True, "summary": False, "dirpath": tmp_path / "elsewhere"}
    for rank in run_on_ranks(fit, directory=tmp_path, monitor=monitor):
        assert rank.printed == ""
        assert rank.in_progress_bar is not None
    assert [step.step for step in steps_of(tmp_path / "elsewhere")] == [8]


def fit_with_lines_logged(**options: Any) -> tuple[Fitted, list[str]]:
    with lines_logged("lightning_bucketddp") as lines:
        return fit(**options), lines


def test_training_goes_on_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    for rank in range(2):
        path_of(tmp_path / FOLDER, rank).symlink_to("/dev/full")
    with_warnings = run_on_ranks(fit_with_lines_logged, directory=tmp_path, monitor=EVERY)
    assert "10 recorded steps on 2 ranks" in with_warnings[0][0].printed
    for number, (_, [text]) in enumerate(with_warnings):  # once
        path = path_of(tmp_path / FOLDER, number)
        assert text.startswith(f"bucketddp: rank {number} cannot record its steps in `{path}` (")
        assert text.endswith(
            "). Training goes on, without a record from here. Pass another `dirpath` to `BucketDDPMonitor`."
        )


@on_ranks()
@like_torchrun()
def test_another_strategy_is_refused() -> None:
    trainer = make_trainer("ddp", callbacks=[BucketDDPMonitor()], max_epochs=1)
    assert raised_by(lambda: trainer.fit(models.Regression(), models.loader())) == (
        "TypeError: `BucketDDPMonitor` records what `bucketddp` does, but the strategy of this Trainer is a"
        ' `DDPStrategy`. Pass `strategy="bucketddp"`, or leave the callback out.'
    )


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`every_n_steps` is 0; it must be at least 1\."):
        BucketDDPMonitor(every_n_steps=0)
