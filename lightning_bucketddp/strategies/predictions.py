"""Predictions of all ranks, put together on rank zero as one process would have made them."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_bucketddp.checkpoint.safe_loading import safe_globals_allowed
from lightning_bucketddp.comm.collectives import Collectives


def gather_predictions(predictions: list[list[Any]], collectives: Collectives) -> None:
    """On rank zero, replace its own `predictions`, by dataloader and batch, by those of all ranks.

    Rank r has made batches r, r + W, ... of each dataloader. They are sent one by one, so that rank zero holds the
    result and never more than one batch beside it.
    """
    hosts = collectives.host_group()
    nums_by_rank: list[list[int]] = hosts.gather_json([len(batches) for batches in predictions])
    for loader, own in enumerate(predictions):
        nums = [nums[loader] for nums in nums_by_rank]
        gathered = []
        for at, rank in ((at, rank) for at in range(max(nums)) for rank, num in enumerate(nums) if at < num):
            if rank == hosts.rank:
                gathered.append(own[at])
                if rank != 0:
                    _send(own[at], hosts)
            elif hosts.rank == 0:
                gathered.append(_receive(hosts, source=rank))
        own[:] = gathered
    collectives.close_host_groups()


def _send(value: Any, hosts: Collectives) -> None:
    buffer = io.BytesIO()
    # Of a view, torch would save all that it is a view of.
    torch.save(apply_to_collection(value, Tensor, torch.clone), buffer)
    raw = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    hosts.send(torch.tensor([raw.numel()]), destination=0)
    hosts.send(raw, destination=0)


def _receive(hosts: Collectives, *, source: int) -> Any:
    size = torch.empty(1, dtype=torch.int64)
    hosts.receive(size, source=source)
    raw = torch.empty(int(size), dtype=torch.uint8)
    hosts.receive(raw, source=source)
    buffer = io.BytesIO(raw.numpy().tobytes())
    try:
        with safe_globals_allowed():
            return torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError:
        # An object of the user's. It comes from a process of the same run, which may do here what it likes anyway.
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)
