"""`ScaleLearningRate`: every step is made with what the scheduler set, times a factor that warms up."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_bucketddp.bindings.trainer_lightning import ScaleLearningRate
from tests.support.ranks import run_on_ranks
from tests.support.scripts.large_batch import (
    fail_within_step,
    find_uneven_batch,
    refusal,
    save_within_step,
    train,
    train_at_rate,
)
from tests.support.scripts.schedules import RATE, SCHEDULES

# Two ranks with batches of four: twice that.
BASE = 4


def multiplier(step: int, *, factor: float = 2, warmup_steps: int) -> float:
    return factor if step >= warmup_steps else 1 + (factor - 1) * step / warmup_steps


def scaled(rates: list[Any], *, warmup_steps: int, first: int = 0) -> list[Any]:
    return [
        [rate * multiplier(step, warmup_steps=warmup_steps) for rate in groups]
        for step, groups in enumerate(rates, start=first)
    ]


@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - {"two_optimizers", "tensor"}))
@pytest.mark.sampled(3)
def test_each_step_is_made_with_the_scheduled_rate_times_the_multiplier(schedule: str) -> None:
    plain = run_on_ranks(train, schedule=schedule)
    ours = run_on_ranks(train, schedule=schedule, scaling={"base_batch_size": BASE, "warmup_steps": 8})
    for rank in ours:
        assert len(rank.of_steps) == 20
        assert rank.of_steps == scaled(plain[0].of_steps, warmup_steps=8)
        assert rank.at_the_end == plain[0].at_the_end
        assert rank.weights == ours[0].weights


def test_a_rate_in_a_tensor_is_scaled_in_place() -> None:
    plain = run_on_ranks(train, schedule="tensor")[0]
    for rank in run_on_ranks(train, schedule="tensor", scaling={"base_batch_size": BASE, "warmup_steps": 8}):
        torch.testing.assert_close(
            torch.tensor(rank.of_steps), torch.tensor(scaled(plain.of_steps, warmup_steps=8)), rtol=1e-6, atol=0
        )
        assert rank.at_the_end == plain.at_the_end
        assert rank.num_tensors == 1


def test_a_second_fit_warms_up_its_new_optimizer(tmp_path: Path) -> None:
    scaling = {"base_batch_size": BASE, "warmup_steps": 8}
    for rank in run_on_ranks(train, fits=2, max_epochs=1, scaling=scaling, directory=tmp_path):
        assert rank.of_steps == 2 * scaled([[RATE]] * 10, warmup_steps=8)
    # One epoch to go in the first fit, three in the second.
    for rank in run_on_ranks(train, fits=2, max_epochs=2, scaling=scaling, resume_from=tmp_path / "step=10.ckpt"):
        assert rank.of_steps == [[2 * RATE]] * 10 + scaled([[RATE]] * 20, warmup_steps=8)


def test_each_optimizer_warms_up_by_its_own_steps() -> None:
    plain = run_on_ranks(train, schedule="two_optimizers", max_epochs=1)[0].of_steps
    scaling = {"base_batch_size": BASE, "warmup_steps": 8}
    for rank in run_on_ranks(train, schedule="two_optimizers", max_epochs=1, scaling=scaling):
        first, second = rank.of_steps[::3], [rates for i, rates in enumerate(rank.of_steps) if i % 3]
        assert first == scaled(plain[::3], warmup_steps=8)
        assert second == scaled([rates for i, rates in enumerate(plain) if i % 3], warmup_steps=8)


@pytest.mark.parametrize(("strategy", "world_size"), [("ddp", 2), ("bucketddp", 1), ("auto", 1)])
def test_it_works_with_any_strategy(strategy: str, world_size: int) -> None:
    scaling = {"base_batch_size": BASE * world_size / 2, "warmup_steps": 8}
    ours = run_on_ranks(train, strategy=strategy, world_size=world_size, schedule="step", max_epochs=1, scaling=scaling)
    plain = run_on_ranks(train, strategy=strategy, world_size=world_size, schedule="step", max_epochs=1)
    assert [rank.of_steps for rank in ours] == [scaled(rank.of_steps, warmup_steps=8) for rank in plain]


def test_mixed_precision_is_scaled_too() -> None:
    plain = run_on_ranks(train, precision="bf16-mixed", schedule="step")[0]
    scaling = {"base_batch_size": BASE, "warmup_steps": 8}
    for rank in run_on_ranks(train, precision="bf16-mixed", schedule="step", scaling=scaling):
        assert rank.of_steps == scaled(plain.of_steps, warmup_steps=8)


def test_training_equals_training_at_the_scaled_rate() -> None:
    scaled_up = run_on_ranks(train_at_rate, rate=RATE, scaling={"base_batch_size": BASE, "warmup_steps": 0})
    assert scaled_up == run_on_ranks(train_at_rate, rate=2 * RATE)
    assert scaled_up != run_on_ranks(train_at_rate, rate=RATE)


@pytest.mark.parametrize(
    ("scaling", "accumulate", "line"),
    [
        (
            {"base_batch_size": 8, "warmup_steps": 5},
            4,
            "global batch 2 x 4 x 4 = 32, base 8: learning rate x 4, warmed up over 5 steps",
        ),
        # Ten batches are three steps; five epochs by default.
        ({"base_batch_size": 8}, 4, "global batch 2 x 4 x 4 = 32, base 8: learning rate x 4, warmed up over 15 steps"),
        (
            {"base_batch_size": 2, "rule": "sqrt", "warmup_epochs": 0.5},
            1,
            "global batch 2 x 4 x 1 = 8, base 2: learning rate x 2, warmed up over 5 steps",
        ),
        ({"base_batch_size": 4, "warmup_epochs": 0}, 1, "global batch 2 x 4 x 1 = 8, base 4: learning rate x 2"),
        ({"base_batch_size": 16}, 1, "global batch 2 x 4 x 1 = 8, base 16: learning rate x 0.5"),
        (
            {"base_batch_size": 10, "warmup_steps": 1, "batch_size_per_rank": 20},
            1,
            "global batch 2 x 20 x 1 = 40, base 10: learning rate x 4, warmed up over 1 steps",
        ),
    ],
)
def test_the_batch_and_the_factor_are_said_in_one_line(scaling: dict[str, Any], accumulate: int, line: str) -> None:
    rank_zero, rank_one = run_on_ranks(train, max_epochs=1, scaling=scaling, accumulate=accumulate)
    assert rank_zero.lines == [f"ScaleLearningRate: {line}"]
    assert rank_one.lines == []
    factor = float(line.partition("rate x ")[2].partition(",")[0])
    steps = scaling.get("warmup_steps", int(line.partition("over ")[2].partition(" ")[0] or 0))
    expected = [[RATE * multiplier(t, factor=factor, warmup_steps=steps if factor > 1 else 0)] for t in range(3)]
    assert rank_zero.of_steps[:3] == rank_one.of_steps[:3] == expected


def test_the_factor_follows_the_accumulation() -> None:
    scaling = {"base_batch_size": BASE, "warmup_steps": 0}
    rank_zero, _ = run_on_ranks(train, scaling=scaling, accumulate={0: 1, 1: 2})
    assert rank_zero.of_steps == [[2 * RATE]] * 10 + [[4 * RATE]] * 5
    assert rank_zero.lines == [
        "ScaleLearningRate: global batch 2 x 4 x 1 = 8, base 4: learning rate x 2",
        "ScaleLearningRate: global batch 2 x 4 x 2 = 16, base 4: learning rate x 4",
    ]


def test_the_factor_follows_reloaded_data() -> None:
    scaling = {"base_batch_size": BASE, "warmup_steps": 0}
    for rank in run_on_ranks(train, scaling=scaling, reload_every=1):
        assert rank.of_steps == [[2 * RATE]] * 10 + [[4 * RATE]] * 5


def test_batches_of_different_sizes_are_added_up() -> None:
    rank_zero, _ = run_on_ranks(find_uneven_batch)
    assert rank_zero == ["ScaleLearningRate: global batch 9 on 2 ranks x 1 = 9, base 2: learning rate x 4.5"]


@pytest.mark.parametrize(
    ("schedule", "interval", "every"),
    [("optimizer", "step", 1), ("step", "step", 1), ("groups", "step", 1), ("step", "epoch", 10)],
)
def test_the_monitor_shows_what_steps_are_made_with(schedule: str, interval: str, every: int) -> None:
    scaling = {"base_batch_size": BASE, "warmup_steps": 15}
    for rank in run_on_ranks(train, schedule=schedule, scaling=scaling, monitor_interval=interval):
        assert [list(groups) for groups in zip(*rank.in_monitor.values(), strict=True)] == rank.of_steps[::every]


@pytest.mark.parametrize(
    "schedule", ["optimizer", "step", "plateau", "sequential", "one_cycle", "groups", "tensor", "two_optimizers"]
)
@pytest.mark.sampled(3)
def test_a_run_resumed_within_the_warm_up_equals_an_uninterrupted_one(schedule: str, tmp_path: Path) -> None:
    scaling = {"base_batch_size": BASE, "warmup_steps": 15}
    whole = run_on_ranks(train, schedule=schedule, scaling=scaling, directory=tmp_path)
    steps = 10 if schedule != "two_optimizers" else 30
    resumed = run_on_ranks(train, schedule=schedule, scaling=scaling, resume_from=tmp_path / f"step={steps}.ckpt")
    for rank, expected in zip(resumed, whole, strict=True):
        assert rank.of_steps == expected.of_steps[steps:]
        assert rank.weights == expected.weights


@pytest.mark.parametrize("schedule", ["optimizer", "tensor"])
def test_checkpoints_hold_the_scheduled_rate(schedule: str, tmp_path: Path) -> None:
    run_on_ranks(save_within_step, schedule=schedule, path=tmp_path / "within.ckpt")
    run_on_ranks(train, schedule=schedule, max_epochs=1, directory=tmp_path, save_every=3)
    within, plain = (torch.load(tmp_path / name, weights_only=True) for name in ("within.ckpt", "step=3.ckpt"))
    rate = {"optimizer": RATE, "tensor": RATE / 8}[schedule]
    assert within["optimizer_states"][0]["param_groups"][0]["lr"] == rate
    assert plain["optimizer_states"][0]["param_groups"][0]["lr"] == rate


def test_a_checkpoint_resumes_with_another_global_batch_and_without_the_callback(tmp_path: Path) -> None:
    run_on_ranks(train, max_epochs=1, scaling={"base_batch_size": BASE, "warmup_steps": 4}, directory=tmp_path)
    for scaling, factor in (({"base_batch_size": 2, "warmup_steps": 4}, 4), (None, 1)):
        for rank in run_on_ranks(train, scaling=scaling, resume_from=tmp_path / "step=10.ckpt"):
            assert rank.of_steps == [[factor * RATE]] * 10


@pytest.mark.parametrize("schedule", ["optimizer", pytest.param("tensor", marks=pytest.mark.long)])
def test_a_fit_that_fails_leaves_optimizer_and_monitor_as_they_were(schedule: str) -> None:
    rate = {"optimizer": RATE, "tensor": RATE / 8}[schedule]
    left = {"rates": [rate], "num_hooks": 0, "monitor": []}
    assert run_on_ranks(fail_within_step, schedule=schedule) == [left, left]


@pytest.mark.parametrize(
    ("data", "scaling", "text"),
    [
        (
            "without_batches",
            {"base_batch_size": 4},
            "`ScaleLearningRate` cannot tell the batch size of the training data, a `DataLoader`. Pass"
            " `batch_size_per_rank`, the samples in one batch of one rank.",
        ),
        (
            "own_batch_sampler",
            {"base_batch_size": 4},
            "`ScaleLearningRate` cannot tell the batch size of the training data, a `DataLoader`. Pass"
            " `batch_size_per_rank`, the samples in one batch of one rank.",
        ),
        (
            "several_loaders",
            {"base_batch_size": 4},
            "`ScaleLearningRate` cannot tell the batch size of the training data, a `list`. Pass"
            " `batch_size_per_rank`, the samples in one batch of one rank.",
        ),
        (
            "endless",
            {"base_batch_size": 4},
            "`ScaleLearningRate` cannot tell how many steps 5 epochs are: the training data has no length. Pass"
            " `warmup_steps`.",
        ),
        ("endless", {"base_batch_size": 4, "warmup_steps": 3}, None),
    ],
)
@pytest.mark.sampled(2)
def test_data_that_does_not_tell_is_refused(data: str, scaling: dict[str, Any], text: str | None) -> None:
    assert run_on_ranks(refusal, data=data, scaling=scaling) == [text, text]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"base_batch_size": 0}, "`base_batch_size` is 0; it must be at least 1."),
        ({"base_batch_size": 1, "rule": "cubic"}, "`rule` is 'cubic'; it must be 'linear' or 'sqrt'."),
        (
            {"base_batch_size": 1, "warmup_epochs": 1, "warmup_steps": 1},
            "`warmup_epochs` and `warmup_steps` say the same thing. Pass one of them.",
        ),
        ({"base_batch_size": 1, "warmup_steps": -1}, "A warm-up of -1 is not possible; pass 0 for none."),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        ScaleLearningRate(**options)
    assert str(raised.value) == text


@pytest.mark.parametrize(
    ("root", "module"),
    [("lightning.pytorch", "trainer_lightning"), ("pytorch_lightning", "trainer_pytorch_lightning")],
)
def test_each_root_has_its_own_classes(root: str, module: str) -> None:
    callbacks = import_module(f"lightning_bucketddp.bindings.{module}")
    for callback in (callbacks.ScaleLearningRate, callbacks.ScalingMonitor):
        assert issubclass(callback, import_module(root).Callback)
