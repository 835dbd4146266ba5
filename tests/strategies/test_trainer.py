"""`Trainer(strategy="bucketddp")` on two processes does what `Trainer(strategy="ddp")` does, and some things more."""

from __future__ import annotations

import pytest
import torch

from tests.support.cases import for_each
from tests.support.ranks import run_on_ranks
from tests.support.scripts.behaviour import (
    batchnorm_after_failed_fit,
    count_reductions,
    count_threads_after_fits,
    fit_with_a_layer_added_between_epochs,
    fit_with_sync_batchnorm,
    module_is_not_wrapped,
    refusal,
    run_stages,
    use_own_layer_sync,
)
from tests.support.scripts.parity import SCENARIOS, Training, train

NUM_BATCHES = 10

REMEDY = (
    " Data-parallel training needs the same module on every rank: build it from the same configuration and freeze the"
    " same parameters everywhere."
)


def train_both(scenario: str) -> tuple[list[Training], list[Training]]:
    """What each rank has when we train, and when torch DDP does."""
    ours = run_on_ranks(train, scenario=scenario, like_ddp=False)
    return ours, run_on_ranks(train, scenario=scenario, like_ddp=True)


@pytest.mark.parametrize(
    "scenario",
    list(SCENARIOS),
)
@pytest.mark.sampled(6)
def test_training_equals_ddp(scenario: str) -> None:
    ours, ddp = train_both(scenario)
    for rank in ours:
        assert rank.weights == ddp[0].weights
        assert rank.validation_losses == ddp[0].validation_losses
        assert rank.gradients_before_step == ddp[0].gradients_before_step


def test_hooks_see_averaged_gradients() -> None:
    ours, ddp = train_both("automatic")
    for rank in ours:
        assert len(rank.gradients_after_backward) == 2 * NUM_BATCHES
        assert rank.gradients_after_backward == rank.gradients_before_step == ddp[0].gradients_after_backward


@for_each(("accumulate", "steps"), [(1, 10), (4, 3), (5, 2), (20, 1)])
def test_accumulation_reduces_each_bucket_once_per_step(accumulate: int, steps: int) -> None:
    for rank in run_on_ranks(count_reductions, module="automatic", accumulate=accumulate):
        assert rank["steps"] == steps
        assert len(rank["reductions_by_bucket"]) > 1
        assert set(rank["reductions_by_bucket"]) == {steps}
        assert rank["counted_by_stats"] == sum(rank["reductions_by_bucket"])


def test_manual_accumulation_reduces_each_bucket_once_per_step() -> None:
    for rank in run_on_ranks(count_reductions, module="manual", accumulate=1):
        assert rank["steps"] == NUM_BATCHES
        assert set(rank["reductions_by_bucket"]) == {NUM_BATCHES}


def test_the_module_is_not_wrapped() -> None:
    for rank in run_on_ranks(module_is_not_wrapped):
        assert rank["is_model"]
        assert rank["is_lightning_module"]
        assert rank["names"] == rank["own_names"]


@pytest.mark.parametrize(
    "stages",
    [["validate"], ["test"], ["predict"], ["fit", "fit"], ["validate", "fit", "test", "fit", "predict"]],
    ids="-".join,
)
def test_each_stage_equals_ddp(stages: list[str]) -> None:
    ours = run_on_ranks(run_stages, stages=stages, strategy="bucketddp")
    ddp = run_on_ranks(run_stages, stages=stages, strategy="ddp")
    assert [rank["results"] for rank in ours] == [rank["results"] for rank in ddp]
    for rank in ours:
        assert rank["steps"] == ddp[0]["steps"]
        assert rank["weights"] == ddp[0]["weights"]


def test_sync_batchnorm_trains_like_one_process_and_is_reverted() -> None:
    ranks = run_on_ranks(fit_with_sync_batchnorm)
    [alone] = run_on_ranks(fit_with_sync_batchnorm, world_size=1)
    for rank in ranks:
        assert (rank["during"], rank["after"]) == ("SyncedBatchNorm2d", "BatchNorm2d")
        torch.testing.assert_close(rank["weights"], alone["weights"])
        torch.testing.assert_close(rank["weights"], ranks[0]["weights"], rtol=0, atol=0)


def test_sync_batchnorm_is_reverted_after_a_fit_that_fails() -> None:
    assert run_on_ranks(batchnorm_after_failed_fit) == ["BatchNorm2d"] * 2


def test_a_layer_sync_plugin_of_the_user_is_applied_and_reverted_once() -> None:
    assert run_on_ranks(use_own_layer_sync) == [["apply", "revert"]] * 2


def test_a_layer_added_between_epochs_starts_from_rank_zero_and_is_trained() -> None:
    ranks = run_on_ranks(fit_with_a_layer_added_between_epochs)
    assert all(rank["trained"] for rank in ranks)
    assert ranks[0]["weights"] == ranks[1]["weights"]


@pytest.mark.parametrize(
    ("of", "kind", "text"),
    [
        (
            "nothing_to_train",
            "ValueError",
            "`Regression` has no parameter that requires a gradient, so there is nothing to train. Unfreeze a"
            " parameter, or run `validate`, `test` or `predict`.",
        ),
        (
            "lazy",
            "ValueError",
            "`Regression` has parameters without a shape yet: `layers.0.weight`, `layers.0.bias`, `layers.1.weight` and"
            " 1 more. Run one batch through the module before training, for example in `configure_model` or `setup`.",
        ),
        (
            "shape",
            "ReplicaMismatchError",
            f"`layers.2.weight` has shape [1, 8] on rank 0 but [3, 8] on rank 1.{REMEDY}",
        ),
        (
            "dtype",
            "ReplicaMismatchError",
            f"`layers.2.weight` has dtype torch.float32 on rank 0 but torch.float64 on rank 1.{REMEDY}",
        ),
        (
            "requires_grad",
            "ReplicaMismatchError",
            f"`layers.0.bias` has requires_grad True on rank 0 but False on rank 1.{REMEDY}",
        ),
        ("extra_layer", "ReplicaMismatchError", f"`extra.weight` exists on rank 1 but not on rank 0.{REMEDY}"),
    ],
)
@pytest.mark.sampled(3)
def test_what_cannot_be_trained_is_named_on_every_rank(of: str, kind: str, text: str) -> None:
    assert run_on_ranks(refusal, of=of, timeout_s=30) == [(kind, text)] * 2


BY_ITSELF = "but this strategy averages the gradients of all submodules by itself."
IGNORED = "or name its parameters in `_ddp_params_and_buffers_to_ignore`."
UNWRAP = f"{BY_ITSELF} Leave the wrapper out: put its `.module` in its place, {IGNORED}"


@pytest.mark.parametrize(
    ("of", "text"),
    [
        ("wrapped: ddp", f"`layers.2` is wrapped in `DistributedDataParallel`, {UNWRAP}"),
        ("wrapped_later", f"`layers.2` is wrapped in `DistributedDataParallel`, {UNWRAP}"),
        ("wrapped: ddp_beside", f"`parallel` is wrapped in `DistributedDataParallel`, {UNWRAP}"),
        ("wrapped: fabric", f"`layers.2` is wrapped in `_FabricModule`, {UNWRAP}"),
        ("wrapped_on_one_rank", f"`layers.0` is wrapped in `DataParallel` on rank 1, {UNWRAP}"),
        (
            "wrapped: fully_shard",
            f"`layers.2` was made parallel by `fully_shard`, {BY_ITSELF} Leave that call out, {IGNORED}",
        ),
        (
            "wrapped: tensor_parallel",
            f"`layers.2` was made parallel by `fully_shard` or `parallelize_module`, {BY_ITSELF} Leave that call out,"
            f" {IGNORED}",
        ),
    ],
)
@pytest.mark.sampled(3)
def test_a_submodule_that_is_parallel_already_is_refused_on_every_rank(of: str, text: str) -> None:
    assert run_on_ranks(refusal, of=of) == [("ValueError", text)] * 2


@pytest.mark.parametrize("how", ["unwrapped", "ignored"])
def test_a_submodule_that_is_left_to_the_strategy_or_kept_from_it_is_trained(how: str) -> None:
    assert run_on_ranks(refusal, of=f"wrapped: {how}") == [("", "")] * 2


def test_fits_leave_no_threads_behind() -> None:
    for counts in run_on_ranks(count_threads_after_fits, num_fits=4):
        assert counts[-1] <= counts[1]
