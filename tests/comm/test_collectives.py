"""What is between the ranks, and its end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lightning_bucketddp.comm.collectives import Collectives
from tests.support.ranks import device, on_ranks, run_on_ranks


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


@on_ranks()
def test_json_of_any_size_is_shared() -> None:
    collectives, rank = Collectives(device()), dist.get_rank()
    for sizes in ([0, 1], [1, 0], [300, 5000]):
        texts = [str(number) * size for number, size in enumerate(sizes)]
        assert collectives.gather_json(texts[rank]) == texts
        assert collectives.broadcast_json(texts[rank], source=1) == texts[1]


def other_has_group(directory: Path) -> bool:
    """Make a group, in which rank 1 arrives late; return whether it is there when this rank goes on."""
    new_group, file = dist.new_group, directory / "rank 1"

    def new_group_late(*args: Any, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        if dist.get_rank() == 1:
            time.sleep(0.3)  # as if it were still connecting
            file.touch()
        return group

    collectives = Collectives(device())
    with mock.patch.object(dist, "new_group", new_group_late):
        collectives.host_group()
    is_there = file.exists()
    dist.barrier()
    collectives.close_host_groups()
    return is_there


def test_no_rank_leaves_a_new_group_while_others_connect(tmp_path: Path) -> None:
    """It might end the program then, and the others would have a connection error."""
    assert run_on_ranks(other_has_group, world_size=2, directory=tmp_path) == [True, True]
