"""State that is divided among the ranks is saved as one, and loaded at any time."""

from __future__ import annotations

import pytest

from tests.support.jobs.sharding import refuse_to_save, save_and_load
from tests.support.ranks import run_on_ranks

# Those whose state has tensors of other shapes, or numbers, or begins before the first step.
OPTIMIZERS = ["sgd", "momentum", "adam", "nadam", "adagrad", "asgd", "signs", "muon", "adafactor"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.sampled(4)
def test_divided_state_is_saved_and_loaded_as_if_it_were_not(optimizer: str) -> None:
    tolerance = 0.0 if optimizer == "sgd" else 1e-6
    run_on_ranks(save_and_load, case="mlp", optimizer=optimizer, shard=True, tolerance=tolerance)


@pytest.mark.parametrize("shard", [True, "parameters"])
@pytest.mark.parametrize(
    "case",
    [
        "channels_last",
        "complex",
        *(pytest.param(case, marks=pytest.mark.long) for case in ("tied_transformer", "partly_frozen", "many_dtypes")),
    ],
)
def test_state_has_the_layout_of_its_parameter(case: str, shard: bool | str) -> None:
    run_on_ranks(save_and_load, case=case, optimizer="adamw", shard=shard, tolerance=1e-6)


def test_a_part_of_the_state_is_not_given_away_as_all_of_it() -> None:
    for error, before in run_on_ranks(refuse_to_save):
        assert before == {}
        assert error == (
            "RuntimeError: The state of `AdamW` is divided among the ranks (`shard_optimizer`), and `state_dict` would"
            " have this rank's part. Save with Lightning, which gathers all of it: `trainer.save_checkpoint`, or"
            " `fabric.save`."
        )
