"""Messages that ranks exchange in each step, and what they come to."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import MessageKind, OutOfStepError, StepExchange
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_ranks_learn_the_same(world_size: int) -> None:
    """All that is exchanged in some steps; then rank 1 has no more data, and waits for nobody."""
    exchange = StepExchange(Collectives(torch.device("cpu")))
    rank = dist.get_rank()
    exchange.send(MessageKind.STEP, weight=rank + 1, full_weight=2, num_skipped=rank, trainable=5)
    assert exchange.compare(2**48)
    assert not exchange.compare(2**48 - (rank == 1))
    step = exchange.receive()
    sums = sum(range(1, world_size + 1)), 2 * world_size, sum(range(world_size))
    assert (step.total.weight, step.total.full_weight, step.total.num_skipped) == sums
    assert (step.least.trainable, step.greatest.trainable, len(step.by_rank)) == (5, 5, world_size)
    exchange.batch_digest, exchange.digest = 7 + rank, rank
    if rank == 1:
        exchange.stop_signal, exchange.wants_requeue = 15, True
    exchange.send(MessageKind.STEP)
    exchange.receive()
    assert exchange.batch_digests == [7 + other for other in range(world_size)]
    flags = exchange.digests_differ, exchange.all_stop_by, exchange.all_requeue, exchange.is_alerted
    assert flags == (True, 15, True, False)
    exchange.num_batches = 2
    go_on = {2: "rank 0 goes on", 3: "ranks 0, 2 go on"}[world_size]
    out_of_data = f"Rank 1 has no more data in epoch 0, while {go_on} after 2 batches."
    if rank == 1:
        exchange.send(MessageKind.OUT_OF_DATA)
    else:
        exchange.send(MessageKind.STEP)
        with pytest.raises(OutOfStepError, match=out_of_data):
            exchange.compare(0)  # rank 1 comes to it later; what was sent before it comes first
    dist.barrier()  # by another group: rank 1 has been there since long
    if rank != 1:
        assert not exchange.close()  # a comparison has begun that rank 1 knows nothing of
    dist.barrier()
    if rank == 1:
        with pytest.raises(OutOfStepError, match=out_of_data):
            exchange.compare(0)
        exchange.receive()  # the comparison itself
        assert exchange.close()
