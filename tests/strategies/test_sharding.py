"""Training through Lightning with `shard_optimizer` gives the weights and the checkpoints of a run without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_on_ranks
from tests.support.saved_state import state_in
from tests.support.scripts.fabrics import LOOPS
from tests.support.scripts.sharding import (
    SCENARIOS,
    compare,
    compare_fabric,
    failure,
    find_divergence,
    fit_and_save,
    fit_with_bad_gradient,
    gradients_in_fabric,
    overflow,
    save_or_load_fabric,
)

TOLERANCE = 1e-6
# What others in `SCENARIOS` show as well; beside ddp all of them are compared.
ALIKE = {
    *("clipped_by_hand_1.0", "manual_backward", "64-true", "unused_everywhere", "unused_on_rank_1", "idle_rank"),
    *("same_graph_twice", "graph_of_backward", "manual_clipping", "own_clipping"),
    *("gradients_changed_while_accumulating", "input_penalty", "gan_toggled_optimizer", "gan_toggle_model"),
    *("gan_discriminator_every_second_batch", "mean_teacher", "frozen_after_a_batch", "pruned_without_validation"),
    *("pruned_for_good", "weight_averaging_with_statistics", "weight_averaging", "accumulation_by_epoch", "copied"),
    *("clipped_by_hand_inf", "plain_sgd_accumulated", "clamped", "two_losses_one_reduction", "closure", "batchnorm"),
    *("gradients_changed_in_place", "weight_penalty", "pruned_by_masks", "frozen_before_a_batch"),
    *("finetuned_layer_by_layer", "gan_nothing_switched_off"),
}


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in ALIKE])
@pytest.mark.sampled(5)
def test_training_equals_that_without_sharding(scenario: str) -> None:
    run_on_ranks(compare, scenario=scenario)


@pytest.mark.parametrize("scenario", ["clip_norm", "finetuned_backbone", "scaler"])
@pytest.mark.sampled(1)
def test_training_by_whole_parameters_equals_that_without_sharding(scenario: str) -> None:
    run_on_ranks(compare, scenario=scenario, shard="parameters")


@pytest.mark.parametrize("shard", [True, "parameters"])
def test_training_on_four_ranks_equals_that_without_sharding(shard: bool | str) -> None:
    run_on_ranks(compare, world_size=4, scenario="64-true", shard=shard)


# --- Failures


def test_an_optimizer_that_cannot_be_divided_is_refused_on_every_rank() -> None:
    for error, _ in run_on_ranks(failure, what="LBFGS"):
        assert error.startswith("ValueError: `shard_optimizer` cannot divide the state of `LBFGS`: it is not known")


def test_a_gradient_that_is_read_is_an_error_and_stays_in_no_module() -> None:
    for rank, (error, gradients) in enumerate(run_on_ranks(failure, what="gradient is read")):
        assert f"`mean` reads the gradient of `layers.0.weight`, of which rank {rank} of 2 has" in error
        assert gradients == {"NoneType"}


def test_an_error_between_backward_and_step_is_the_one_that_is_raised() -> None:
    for error, gradients in run_on_ranks(failure, what="module fails"):
        assert "of the module itself" in error
        assert gradients == {"NoneType"}


def test_all_ranks_skip_the_step_of_which_one_rank_has_an_infinite_gradient() -> None:
    for scale, weights in run_on_ranks(overflow, timeout_s=30):
        assert scale == 32.0  # halved once
        assert all(bool(weight.isfinite().all()) for weight in weights.values())


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_a_gradient_that_is_not_finite_is_named_by_all_ranks(on_nonfinite: str) -> None:
    ranks = run_on_ranks(fit_with_bad_gradient, on_nonfinite=on_nonfinite)
    told = [error if on_nonfinite == "raise" else " ".join(messages) for error, messages in ranks]
    assert "the gradient of `layers.0.bias` on rank 1" in told[0]


def test_a_weight_that_differs_is_found() -> None:
    for error in run_on_ranks(find_divergence):
        assert "`layers.0.weight` differs between rank 0 and rank 1" in error


# --- Checkpoints


def assert_same_state(path: Path, expected: Path) -> None:
    """Assert that checkpoints have the same entries, of the same kinds, and the same numbers but for rounding."""
    ours, others = state_in(path), state_in(expected)
    torch.testing.assert_close(ours, others, rtol=1e-12, atol=1e-12)
    assert outline(ours) == outline(others)


def outline(state: Any) -> Any:
    """Return `state` with what kind each value is."""
    if isinstance(state, dict):
        return {key: outline(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [outline(value) for value in state]
    if isinstance(state, torch.Tensor):
        return type(state), state.dtype, state.shape, state.stride(), state.device
    return type(state)


@pytest.fixture(scope="module")
def undivided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torch DDP has after three epochs, and in the last one."""
    path: Path = tmp_path_factory.mktemp("undivided") / "3.ckpt"
    run_on_ranks(fit_and_save, shard=None, max_epochs=3, save_to=path)
    return path


@pytest.mark.parametrize("shard", [True, "parameters"])
@pytest.mark.parametrize("asynchronously", [False, True])
def test_a_checkpoint_is_that_of_ddp(shard: bool | str, asynchronously: bool, undivided: Path, tmp_path: Path) -> None:
    path = tmp_path / "3.ckpt"
    run_on_ranks(fit_and_save, shard=shard, max_epochs=3, save_to=path, asynchronously=asynchronously)
    assert_same_state(path, undivided)
    assert_same_state(path.with_suffix(".inside"), undivided.with_suffix(".inside"))


@pytest.mark.parametrize(
    "runs",
    [
        [(2, True), (2, None)],
        [(2, None), (2, True)],
        [(2, True), (1, None)],
        [(1, None), (2, "parameters")],
        [(2, True), (4, True), (2, "parameters")],
        [(2, "parameters"), (4, "parameters"), (1, True)],
    ],
    ids=str,
)
@pytest.mark.sampled(3)
def test_a_checkpoint_resumes_with_and_without_sharding_on_any_number_of_ranks(
    runs: list[tuple[int, bool | str | None]], undivided: Path, tmp_path: Path
) -> None:
    before: Path | None = None
    for epoch, (world_size, shard) in enumerate(runs, start=1):
        max_epochs = 3 if epoch == len(runs) else epoch
        path = tmp_path / f"{epoch}.ckpt"
        run_on_ranks(
            fit_and_save, world_size=world_size, shard=shard, max_epochs=max_epochs, save_to=path, resume_from=before
        )
        before = path
    assert before is not None
    assert_same_state(before, undivided)


# --- Fabric


@pytest.mark.parametrize(
    ("loop", "shard"),
    [*((loop, True) for loop in LOOPS if not loop.startswith("buffer")), ("two_modules", "parameters")],
)
@pytest.mark.sampled(4)
def test_a_loop_of_fabric_trains_as_without_sharding(loop: str, shard: bool | str) -> None:
    run_on_ranks(compare_fabric, loop=loop, shard=shard)


@pytest.mark.parametrize(("saved", "loaded"), [(True, False), (False, True), ("parameters", True)])
def test_a_checkpoint_of_fabric_trains_on(saved: bool | str, loaded: bool | str, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    expected = run_on_ranks(save_or_load_fabric, shard=saved, path=path, loads=False)
    trained = run_on_ranks(save_or_load_fabric, shard=loaded, path=path, loads=True)
    torch.testing.assert_close(trained, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_whole_gradient_can_be_asked_for() -> None:
    run_on_ranks(gradients_in_fabric)
