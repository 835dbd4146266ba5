"""Messages that ranks exchange in each step, and what they come to."""

from __future__ import annotations

import pytest

from tests.support.jobs.exchanging import take_turns_at_exchanging
from tests.support.ranks import run_on_ranks


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_learn_the_same(world_size: int) -> None:
    ranks = run_on_ranks(take_turns_at_exchanging, world_size=world_size)
    go_on = {2: "rank 0 goes on", 3: "ranks 0, 2 go on"}[world_size]
    for rank, told in enumerate(ranks):
        assert told["sums"] == (sum(range(1, world_size + 1)), 2 * world_size, sum(range(world_size)))
        assert told["trainable"] == (5, 5)
        assert told["by_rank"] == world_size
        assert told["compared"] == (True, False)
        assert told["batch_digests"] == [7 + other for other in range(world_size)]
        assert told["flags"] == (True, 15, True, False)
        assert f"Rank 1 has no more data in epoch 0, while {go_on} after 2 batches." in told["raised"]
        # The others have begun a comparison that rank 1 knew nothing of.
        assert told["is_quiet"] == (rank == 1)
