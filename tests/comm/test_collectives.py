"""What is between the ranks, and its end."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_bucketddp.comm.collectives import Collectives
from tests.support.cases import for_each
from tests.support.ranks import device, on_ranks, run_on_ranks


def share_texts(num_chars: list[list[int]]) -> list[tuple[list[str], str]]:
    """Gather, and broadcast from rank 1, texts of `num_chars[i][rank]` characters: what came."""
    collectives = Collectives(device())
    own = [str(dist.get_rank()) * sizes[dist.get_rank()] for sizes in num_chars]
    return [(collectives.gather_json(text), collectives.broadcast_json(text, source=1)) for text in own]


@on_ranks()
def test_a_group_is_closed_when_gloo_has_let_go_of_all_tensors() -> None:
    """Whether a group is closed while an operation that has ended is still there, and when it has gone."""
    collectives = Collectives(device())
    pending = collectives.host_group().start_gather(torch.zeros(2))
    pending.wait()
    collectives.close_host_groups()
    is_closed_at_once = "host" not in collectives._further
    del pending  # with it goes the operation, and what it holds
    collectives.close_host_groups()
    # Before that, a thread of gloo's may wait for the interpreter while the interpreter waits for that thread.
    assert not is_closed_at_once
    assert "host" not in collectives._further


@for_each("operation", ["sum", "gather", "start_gather"])
@on_ranks()
def test_all_tensors_of_an_operation_are_held(operation: str) -> None:
    """How many tensors an operation of a new group is given, and how many of them are held until it lets them go."""
    collectives = Collectives(device())
    hosts = collectives.host_group()
    pending = getattr(hosts, operation)(torch.zeros(2))
    assert hosts._in_flight is not None
    held = len(hosts._in_flight)
    del pending
    collectives.close_host_groups()
    assert held == (1 if operation == "sum" else hosts.world_size + 1)


def test_json_of_any_size_is_shared() -> None:
    sizes = [[0, 1], [1, 0], [300, 5000]]
    expected = [(["0" * of_0, "1" * of_1], "1" * of_1) for of_0, of_1 in sizes]
    assert run_on_ranks(share_texts, num_chars=sizes) == [expected] * 2
