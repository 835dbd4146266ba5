"""Numbers and messages that ranks exchange between their hosts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import MessageKind, OutOfStepError, StepExchange


def take_turns_at_exchanging() -> dict[str, Any]:
    """All that is exchanged in some steps; then rank 1 has no more data, and waits for nobody."""
    exchange = StepExchange(Collectives(torch.device("cpu")))
    rank = dist.get_rank()
    told: dict[str, Any] = {}
    exchange.send(MessageKind.STEP, weight=rank + 1, full_weight=2, num_skipped=rank, trainable=5)
    same, other = exchange.start_comparison(2**48), exchange.start_comparison(2**48 - (rank == 1))
    step = exchange.receive()
    told["sums"] = (step.weight, step.full_weight, step.num_skipped)
    told["trainable"] = (step.least.trainable, step.greatest.trainable)
    told["by_rank"] = len(step.by_rank)
    told["compared"] = (same.wait(), other.wait())
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
        exchange.start_comparison(0)  # rank 1 comes to it later
        with pytest.raises(OutOfStepError) as raised:
            exchange.receive()
        told["raised"] = str(raised.value)
    dist.barrier()  # by another group: rank 1 has been there since long
    if rank != 1:
        told["is_quiet"] = exchange.close()
    dist.barrier()
    if rank == 1:
        late = exchange.start_comparison(0)
        with pytest.raises(OutOfStepError) as raised:
            late.wait()  # what had come in the meantime comes first
        told["raised"] = str(raised.value)
        assert late.wait()
        told["is_quiet"] = exchange.close()
    return told
