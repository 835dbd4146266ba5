"""Closing a group while gloo may still hold what it was given."""

from __future__ import annotations

import torch

from lightning_bucketddp.comm.collectives import Collectives
from tests.support.ranks import device


def is_closed_while_a_tensor_is_lent() -> tuple[bool, bool]:
    """Whether a group is closed while an operation that has ended is still there, and when it has gone."""
    collectives = Collectives(device())
    pending = collectives.host_group().start_gather(torch.zeros(2))
    pending.wait()
    collectives.close_host_groups()
    is_closed_at_once = "host" not in collectives._further
    del pending  # with it goes the operation, and what it holds
    collectives.close_host_groups()
    return is_closed_at_once, "host" not in collectives._further


def tensors_held(operation: str) -> tuple[int, int]:
    """How many tensors an operation of a new group is given, and how many of them are held until it lets them go."""
    collectives = Collectives(device())
    hosts = collectives.host_group()
    pending = getattr(hosts, operation)(torch.zeros(2))
    assert hosts._lent is not None
    held = len(hosts._lent)
    del pending
    collectives.close_host_groups()
    return (1 if operation == "sum" else hosts.world_size + 1), held
