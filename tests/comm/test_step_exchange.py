"""Messages that ranks exchange in each step, and what they come to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import MessageKind, OutOfStepError, StepExchange
from tests.support.ranks import run_on_ranks


def take_turns_at_exchanging() -> dict[str, Any]:
    """All that is exchanged in some steps; then rank 1 has no more data, and waits for nobody."""
    exchange = StepExchange(Collectives(torch.device("cpu")))
    rank = dist.get_rank()
    told: dict[str, Any] = {}
    exchange.send(MessageKind.STEP, weight=rank + 1, full_weight=2, num_skipped=rank, trainable=5)
    told["compared"] = (exchange.compare(2**48), exchange.compare(2**48 - (rank == 1)))
    step = exchange.receive()
    told["sums"] = (step.weight, step.full_weight, step.num_skipped)
    told["trainable"] = (step.least.trainable, step.greatest.trainable)
    told["by_rank"] = len(step.by_rank)
    exchange.batch_digest, exchange.digest = 7 + rank, rank
    if rank == 1:
        exchange.stop_signal, exchange.wants_requeue = 15, True
    exchange.send(MessageKind.STEP)
    exchange.receive()
    told["batch_digests"] = exchange.batch_digests
    told["flags"] = (exchange.digests_differ, exchange.all_stop_by, exchange.all_requeue, exchange.is_alerted)
    exchange.num_batches = 2
    if rank == 1:
        exchange.send(MessageKind.OUT_OF_DATA)
    else:
        exchange.send(MessageKind.STEP)
        with pytest.raises(OutOfStepError) as raised:
            exchange.compare(0)  # rank 1 comes to it later; what was sent before it comes first
        told["raised"] = str(raised.value)
    dist.barrier()  # by another group: rank 1 has been there since long
    if rank != 1:
        told["is_quiet"] = exchange.close()
    dist.barrier()
    if rank == 1:
        with pytest.raises(OutOfStepError) as raised:
            exchange.compare(0)
        told["raised"] = str(raised.value)
        exchange.receive()  # the comparison itself
        told["is_quiet"] = exchange.close()
    return told


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
