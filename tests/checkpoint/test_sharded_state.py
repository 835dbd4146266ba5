"""State that is divided among the ranks is saved as one, and loaded at any time."""

from __future__ import annotations

import copy

import torch

from lightning_bucketddp.sharding.optimizer import gather_optimizer_state
from lightning_bucketddp.sharding.shards import ShardOption
from tests.support.cases import for_each
from tests.support.jobs.sharding import Run
from tests.support.ranks import on_ranks, raised_by, run_on_ranks


def save_and_load(*, case: str, optimizer: str, shard: ShardOption, tolerance: float) -> None:
    """Gather the state in the middle of a training and load it at several times; all go on like an undivided one."""
    whole, sharded = (Run(case, optimizer, shard=option).train(range(3)) for option in (False, shard))
    of_whole = whole.inner.state_dict()
    assert sharded.shards is not None
    gathered = gather_optimizer_state(sharded.shards.optimizers[0])
    if sharded.collectives.rank == 0:
        torch.testing.assert_close(gathered, of_whole, rtol=tolerance, atol=tolerance, check_stride=True)
        assert gathered["state"].keys() == of_whole["state"].keys()
    else:
        assert gathered == {}
    weights = {name: value.clone() for name, value in whole.model.state_dict().items()}
    saved = copy.deepcopy(of_whole)
    whole.train(range(3, 5))
    for steps_before in (0, 1, 2):
        run = Run(case, optimizer, shard=shard).train(range(10, 10 + steps_before))
        run.model.load_state_dict(weights)
        run.inner.load_state_dict(copy.deepcopy(saved))  # torch keeps the tensors, too
        run.train(range(3, 5))
        torch.testing.assert_close(run.weights, whole.weights, rtol=tolerance, atol=tolerance)


# Those whose state has tensors of other shapes, or numbers, or begins before the first step.
OPTIMIZERS = ["sgd", "nadam", "adagrad", "signs", "adafactor"]


@for_each("optimizer", OPTIMIZERS)
def test_divided_state_is_saved_and_loaded_as_if_it_were_not(optimizer: str) -> None:
    tolerance = 0.0 if optimizer == "sgd" else 1e-6
    run_on_ranks(save_and_load, case="mlp", optimizer=optimizer, shard=True, tolerance=tolerance)


@for_each("shard", [True, "parameters"])
@for_each("case", ["channels_last", "complex"])
def test_state_has_the_layout_of_its_parameter(case: str, shard: bool | str) -> None:
    run_on_ranks(save_and_load, case=case, optimizer="adamw", shard=shard, tolerance=1e-6)


@on_ranks()
def test_a_part_of_the_state_is_not_given_away_as_all_of_it() -> None:
    run = Run()
    assert run.inner.state_dict()["state"] == {}
    run.train([0])
    assert raised_by(run.inner.state_dict) == (
        "RuntimeError: The state of `AdamW` is divided among the ranks (`shard_optimizer`), and `state_dict` would"
        " have this rank's part. Save with Lightning, which gathers all of it: `trainer.save_checkpoint`, or"
        " `fabric.save`."
    )
