"""With `shard_optimizer` the weights are those of a run without it, and each rank has its part of the state."""

from __future__ import annotations

import pytest

from tests.support.jobs.models import CASES
from tests.support.jobs.sharding import OPTIMIZERS, compare
from tests.support.ranks import run_on_ranks

# An optimizer's kernels may add and multiply in one rounding or in two, depending on where a slice begins.
TOLERANCE = 1e-6


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_takes_the_same_steps(optimizer: str) -> None:
    tolerance = 0.0 if optimizer == "sgd" else TOLERANCE
    ranks = run_on_ranks(compare, case="mlp", optimizer=optimizer, tolerance=tolerance)
    assert sum(sharded.state_numel for _, sharded in ranks) == ranks[0][0].state_numel


@pytest.mark.parametrize("case", [case for case in CASES if case != "sparse_embedding"])
def test_every_model_takes_the_same_steps(case: str) -> None:
    run_on_ranks(compare, case=case, optimizer="adamw", tolerance=TOLERANCE)
