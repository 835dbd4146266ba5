"""`Fabric(strategy="bucketddp")` on two processes does what `Fabric(strategy="ddp")` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.scripts.fabrics import (
    LOOPS,
    ROOTS,
    count_reductions,
    failure_to_save,
    load,
    refusal_of_wrapped,
    save,
    talk,
    train,
    train_after_another_set_up,
    train_with_the_public_class,
)

# What torch DDP needs for the same result.
LOOP_FOR_DDP = {"idle_rank": "zero_loss_on_one_rank"}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.sampled(5)
def test_training_equals_ddp(loop: str) -> None:
    ddp = run_on_ranks(train, strategy="ddp", loop=LOOP_FOR_DDP.get(loop, loop))
    assert run_on_ranks(train, strategy="bucketddp", loop=loop) == ddp


def test_both_roots_train_alike() -> None:
    lightning, lightning_fabric = (
        run_on_ranks(train, strategy="bucketddp", loop="two_modules", root=root) for root in ROOTS
    )
    assert lightning == lightning_fabric


def test_the_class_that_is_for_the_trainer_too_trains_alike() -> None:
    by_name = run_on_ranks(train, strategy="bucketddp", loop="two_modules")
    assert run_on_ranks(train_with_the_public_class, loop="two_modules") == by_name


def test_accumulation_reduces_each_bucket_once_per_step() -> None:
    for reductions_by_bucket in run_on_ranks(count_reductions):
        assert len(reductions_by_bucket) > 1
        assert set(reductions_by_bucket) == {2}


@pytest.mark.parametrize(("saved_by", "loaded_by"), [("ddp", "bucketddp"), ("bucketddp", "ddp")])
def test_a_loaded_checkpoint_trains_on(saved_by: str, loaded_by: str, tmp_path: Path) -> None:
    saved = run_on_ranks(save, strategy=saved_by, path=tmp_path / "model.ckpt")
    loaded = run_on_ranks(load, strategy=loaded_by, path=tmp_path / "model.ckpt")
    assert saved[0] == loaded[0]


def test_a_failure_to_save_is_raised_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "model.ckpt"
    rank_zero, rank_one = run_on_ranks(failure_to_save, path=path)
    assert rank_zero.startswith(f"CheckpointWriteError: Could not write checkpoint `{path}`: Not a directory.")
    assert rank_one == f"{rank_zero} (on rank 0)"


def test_collectives_return_what_those_of_ddp_do() -> None:
    ours = run_on_ranks(talk, strategy="bucketddp")
    assert ours == run_on_ranks(talk, strategy="ddp")
    assert ours[0] == {
        "gathered": [[1.0, 10.0], [2.0, 10.0]],
        "gradient": [2.0, 2.0],
        "gathered_dict": {"rank": [0, 1]},
        "mean": [1.5, 10.0],
        "sum": [3.0, 20.0],
        "broadcast": {"from": 1},
    }


@pytest.mark.parametrize("root", ROOTS)
def test_a_module_that_is_parallel_already_is_refused_on_every_rank(root: str) -> None:
    part, whole = (run_on_ranks(refusal_of_wrapped, root=root, whole=whole) for whole in (False, True))
    wrapped = "is wrapped in `DistributedDataParallel`, but this strategy averages the gradients of all submodules"
    assert all(error.startswith(f"ValueError: `1` {wrapped} by itself. Leave the wrapper out") for error in part)
    assert all(error.startswith(f"ValueError: `DistributedDataParallel` {wrapped} by itself.") for error in whole)


@pytest.mark.parametrize("by", ["the_same_fabric", "another_fabric"])
def test_a_module_that_is_set_up_again_is_averaged_once(by: str) -> None:
    expected = run_on_ranks(train, strategy="bucketddp", loop="backward")
    assert run_on_ranks(train_after_another_set_up, by=by) == [("", weights) for weights in expected]


def test_modules_that_share_parameters_cannot_both_be_set_up() -> None:
    error = (
        "`0.weight` belongs to another module, too, that was set up before: its gradient would be averaged twice."
        " Set up one module that holds all parameters."
    )
    assert run_on_ranks(train_after_another_set_up, by="part") == [(error, [])] * 2
