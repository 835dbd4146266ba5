"""What is between the ranks, and its end."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_bucketddp.comm.collectives import Collectives
from tests.support.cases import for_each
from tests.support.ranks import device, on_ranks


@on_ranks()
def test_a_group_is_closed_when_gloo_has_let_go_of_all_tensors() -> None:
    collectives = Collectives(device())
    pending = collectives.host_group().start_gather(torch.zeros(2))
    pending.wait()
    collectives.close_host_groups()
    # Now a thread of gloo's might wait for the interpreter while the interpreter waits for that thread.
    assert "host" in collectives._further
    del pending  # with it goes the operation, and what it holds
    collectives.close_host_groups()
    assert "host" not in collectives._further


@for_each("operation", ["sum", "gather", "start_gather"])
@on_ranks()
def test_all_tensors_of_an_operation_are_held(operation: str) -> None:
    collectives = Collectives(device())
    hosts = collectives.host_group()
    pending = getattr(hosts, operation)(torch.zeros(2))
    assert hosts._in_flight is not None
    held = len(hosts._in_flight)
    del pending
    collectives.close_host_groups()
    assert held == (1 if operation == "sum" else hosts.world_size + 1)


@on_ranks()
def test_json_of_any_size_is_shared() -> None:
    collectives, rank = Collectives(device()), dist.get_rank()
    for sizes in ([0, 1], [1, 0], [300, 5000]):
        texts = [str(number) * size for number, size in enumerate(sizes)]
        assert collectives.gather_json(texts[rank]) == texts
        assert collectives.broadcast_json(texts[rank], source=1) == texts[1]
