"""`Fabric(strategy="bucketddp")` on two processes does what `Fabric(strategy="ddp")` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_bucketddp
from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy
from tests.support.cases import for_each
from tests.support.collectives import all_reduced
from tests.support.ranks import on_ranks, raised_by, run_on_ranks
from tests.support.scripts.fabrics import (
    LOOPS,
    NUM_STEPS,
    ROOTS,
    _accumulate,
    _set_up,
    _step,
    _weights,
    make_fabric,
    save_and_load,
)
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, ours_and_ddp


@like_torchrun()
def train(*, strategy: Any, loop: str, root: str = ROOTS[0]) -> list[Any]:
    """The weights that one of the training loops below leaves."""
    return LOOPS[loop](make_fabric(strategy, root=root))


@like_torchrun()
def failure_to_save(*, path: Path) -> str:
    return raised_by(lambda: make_fabric("bucketddp").save(path, {"step": 1}))


@for_each("root", ROOTS)
@on_ranks()
@like_torchrun()
def test_a_module_that_is_parallel_already_is_refused_on_every_rank(root: str) -> None:
    parallel = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    wrapped = "is wrapped in `DistributedDataParallel`, but this strategy averages the gradients of all submodules"
    for module, name in ((nn.Sequential(nn.Linear(4, 4), parallel), "1"), (parallel, "DistributedDataParallel")):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=f"^`{name}` {wrapped} by itself. Leave the wrapper out"):
            make_fabric("bucketddp", root=root).setup(module, optimizer)


@like_torchrun()
def train_after_another_set_up(*, by: str) -> tuple[str, list[Any]]:
    """The error and the weights of a training whose module, or a part of it, was set up before."""
    fabric = make_fabric("bucketddp")
    module, _ = _set_up(fabric)
    if by == "another_fabric":
        fabric = make_fabric("bucketddp")
    inside = module.module
    if by == "part":
        inside = nn.Sequential(inside[0], nn.Linear(8, 1))
    try:
        module, optimizer = fabric.setup(inside, torch.optim.SGD(inside.parameters(), lr=0.1, momentum=0.9))
    except ValueError as error:
        return str(error), []
    for step in range(NUM_STEPS):
        _step(fabric, module, optimizer, step=step)
    return "", _weights(module)


@like_torchrun()
def talk(*, strategy: str) -> dict[str, Any]:
    """What the collectives of Fabric return."""
    fabric = make_fabric(strategy)
    mine = torch.tensor([1.0 + fabric.global_rank, 10.0], requires_grad=True)
    gathered = fabric.all_gather(mine, sync_grads=True)
    (gathered * torch.tensor([[1.0], [2.0]])).sum().backward()
    assert mine.grad is not None
    return {
        "gathered": gathered.tolist(),
        "gradient": mine.grad.tolist(),
        "gathered_dict": {
            key: value.tolist() for key, value in fabric.all_gather({"rank": fabric.global_rank}).items()
        },
        "mean": fabric.all_reduce(mine.detach().clone()).tolist(),
        "sum": fabric.all_reduce(mine.detach().clone(), reduce_op="sum").tolist(),
        "broadcast": fabric.broadcast({"from": fabric.global_rank}, src=1),
    }


# What torch DDP needs for the same result.
LOOP_FOR_DDP = {"idle_rank": "zero_loss_on_one_rank"}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.sampled(5)
def test_training_equals_ddp(loop: str) -> None:
    ddp = run_on_ranks(train, strategy="ddp", loop=LOOP_FOR_DDP.get(loop, loop))
    assert run_on_ranks(train, strategy="bucketddp", loop=loop) == ddp


def test_both_roots_and_the_class_that_is_for_the_trainer_too_train_alike() -> None:
    expected, other_root = (run_on_ranks(train, strategy="bucketddp", loop="two_modules", root=root) for root in ROOTS)
    public_class = lightning_bucketddp.BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB)
    assert run_on_ranks(train, strategy=public_class, loop="two_modules") == expected == other_root


@on_ranks()
@like_torchrun()
def test_accumulation_reduces_each_bucket_once_per_step() -> None:
    """Gradients accumulate over three backwards, twice."""
    fabric = make_fabric(BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB))
    with all_reduced() as reduced:
        _accumulate(fabric)
    [reducer] = fabric.strategy.reducers.values()
    reductions_by_bucket = [
        sum(tensor.data_ptr() == bucket.wire.data_ptr() for tensor in reduced) for bucket in reducer.bucket_set.buckets
    ]
    assert len(reductions_by_bucket) > 1
    assert set(reductions_by_bucket) == {2}


@for_each(("saved_by", "loaded_by"), [("ddp", "bucketddp"), ("bucketddp", "ddp")])
@on_ranks()
@like_torchrun()
def test_a_loaded_checkpoint_trains_on(saved_by: str, loaded_by: str, tmp_path: Path) -> None:
    saved, loaded = save_and_load(saved_by=saved_by, loaded_by=loaded_by, path=tmp_path / f"{saved_by}.ckpt")
    if dist.get_rank() == 0:  # torch DDP leaves the others the statistics of their last batch
        assert saved == loaded


def test_a_failure_to_save_is_raised_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "model.ckpt"
    rank_zero, rank_one = run_on_ranks(failure_to_save, path=path)
    assert rank_zero.startswith(f"CheckpointWriteError: Could not write checkpoint `{path}`: Not a directory.")
    assert rank_one == f"{rank_zero} (on rank 0)"


def test_collectives_return_what_those_of_ddp_do() -> None:
    ours, ddp = ours_and_ddp(talk)
    assert ours == ddp
    assert ours[0] == {
        "gathered": [[1.0, 10.0], [2.0, 10.0]],
        "gradient": [2.0, 2.0],
        "gathered_dict": {"rank": [0, 1]},
        "mean": [1.5, 10.0],
        "sum": [3.0, 20.0],
        "broadcast": {"from": 1},
    }


@for_each("by", ["the_same_fabric", "another_fabric"])
def test_a_module_that_is_set_up_again_is_averaged_once(by: str) -> None:
    expected = run_on_ranks(train, strategy="bucketddp", loop="backward")
    assert run_on_ranks(train_after_another_set_up, by=by) == [("", weights) for weights in expected]


def test_modules_that_share_parameters_cannot_both_be_set_up() -> None:
    error = (
        "`0.weight` belongs to another module, too, that was set up before: its gradient would be averaged twice."
        " Set up one module that holds all parameters."
    )
    assert run_on_ranks(train_after_another_set_up, by="part") == [(error, [])] * 2
