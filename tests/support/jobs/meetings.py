"""Jobs in which ranks meet; what they call themselves may differ from what they are."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from lightning_bucketddp.startup.rendezvous import RankInfo, Rendezvous, RendezvousRound
from lightning_bucketddp.startup.store import StartError, StoreAddress

ALL_THERE = "all there"


def meet(
    *,
    port: int,
    ranks: list[int],
    world_sizes: list[int],
    start_timeout_s: float = 60,
    late_s: list[float] | None = None,
    failure_on: int | None = None,
    agent: bool = False,
    num_meetings: int = 1,
    rank_one_waits_for: Path | None = None,
) -> dict[str, Any]:
    """Meet as rank `ranks[r]` of `world_sizes[r]`: the outcome in words, and how long it took."""
    me = dist.get_rank()
    time.sleep(late_s[me] if late_s else 0)
    while me == 1 and rank_one_waits_for is not None and not rank_one_waits_for.exists():
        time.sleep(0.01)
    point = StoreAddress(
        address="127.0.0.1", port=port, rank=ranks[me], world_size=world_sizes[me], local_rank=ranks[me]
    )
    # As torchrun sets them. Agents count the restarts that ranks of their own host have caused.
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(me)} if agent else {}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    began = time.monotonic()
    with patch.dict(os.environ, variables):
        try:
            for _ in range(num_meetings):
                rendezvous = Rendezvous(point, timeout_s=start_timeout_s)
                store = rendezvous.meet(listener=None, find_failure=_failure_of(failure_on == me))
                dist.barrier()  # the host of the store stays until the others have read it
                del store
            outcome = ALL_THERE
        except StartError as error:
            outcome = str(error)
    return {"outcome": outcome, "seconds": time.monotonic() - began, "pid": os.getpid()}


def _failure_of(is_me: bool) -> Callable[[], str | None]:
    """Fail once this rank has joined, so that rank 0 knows of it."""
    has_joined = threading.Event()
    join = RendezvousRound.join

    def join_and_note(rdzv: RendezvousRound, info: RankInfo) -> None:
        join(rdzv, info)
        has_joined.set()

    if is_me:
        RendezvousRound.join = join_and_note  # type: ignore[method-assign,assignment]

    def find_failure() -> str | None:
        if not has_joined.is_set():
            return None
        RendezvousRound.join = join  # type: ignore[method-assign]
        return "it broke"

    return find_failure


def meet_alone(port: int, *, rank: int, timeout_s: float, world_size: int = 2) -> None:
    """Meet in this process."""
    point = StoreAddress(address="127.0.0.1", port=port, rank=rank, world_size=world_size, local_rank=0)
    Rendezvous(point, timeout_s=timeout_s).meet(listener=None, find_failure=lambda: None)
