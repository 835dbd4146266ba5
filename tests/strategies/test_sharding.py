"""Training through Lightning with `shard_optimizer` gives the weights and the checkpoints of a run without it."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.scripts.sharding import SCENARIOS, compare


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_training_equals_that_without_sharding(scenario: str) -> None:
    run_on_ranks(compare, scenario=scenario)
