"""Numbers and messages that ranks exchange between their hosts."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bucketddp.comm import small_reduce
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.small_reduce import DoublingReduce, Reduced, RingReduce
from lightning_bucketddp.comm.step_exchange import MessageKind, OutOfStepError, StepExchange


def reduce_and_gather() -> tuple[list[Reduced], list[list[list[float]]], int]:
    """Some reductions, all started before the first is waited for; what a plain gather gives; and messages sent."""
    hosts = Collectives(torch.device("cpu")).host_group()
    reduce = DoublingReduce(hosts, needs_all=lambda reduced: reduced.greatest[0] == 3)
    num_sent = _count_sends(reduce)
    generator = random.Random(dist.get_rank())
    numbers = [[step, *(generator.randint(-(2**40), 2**40) for _ in range(4))] for step in range(4)]
    pending = [reduce.start(some) for some in numbers]
    reduced = [one.wait() for one in pending]
    assert all(one.has_arrived for one in pending)
    reduce.close()
    plain = [torch.stack(hosts.gather(torch.tensor(some, dtype=torch.float64))).tolist() for some in numbers]
    return reduced, plain, len(num_sent)


def _count_sends(reduce: DoublingReduce) -> list[int]:
    """Return the partners to which messages go from now on."""
    rounds = reduce._rounds
    group = rounds._group
    partners: list[int] = []

    class Counting:
        recv = group.recv

        def send(self, tensors: Any, partner: int, tag: int) -> Any:
            partners.append(partner)
            return group.send(tensors, partner, tag)

    rounds._group = Counting()
    return partners


def take_turns_at_exchanging(ring_up_to: int) -> dict[str, Any]:
    """All that is exchanged in some steps; then rank 1 has no more data, and waits for nobody."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_reduce, "_RING_UP_TO", ring_up_to)
        exchange = StepExchange(Collectives(torch.device("cpu")))
        rank = dist.get_rank()
        told: dict[str, Any] = {"is_ring": isinstance(exchange._reduce, RingReduce)}
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


def names_of_threads() -> list[str]:
    """Return the threads that are left, by name."""
    return sorted(thread.name for thread in threading.enumerate())
