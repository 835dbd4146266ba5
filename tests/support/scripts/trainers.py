"""A Trainer for jobs that run on ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from lightning.pytorch import Trainer

import lightning_bucketddp  # noqa: F401  (jobs need no installed package; scripts do)
from tests.support.ranks import device

# So that the modules of the tests need several buckets.
SMALL_BUCKETS_MB = 40 / 2**20


@contextmanager
def like_torchrun() -> Iterator[None]:
    """Let Lightning see the ranks that run a job as processes that torchrun has started."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    # Ranks that share a GPU are nodes with one device each.
    on_gpu = device().type == "cuda"
    variables = {
        "TORCHELASTIC_RUN_ID": "tests",
        "RANK": rank,
        "LOCAL_RANK": "0" if on_gpu else rank,
        "GROUP_RANK": rank if on_gpu else "0",
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": "1" if on_gpu else world_size,
        "GROUP_WORLD_SIZE": world_size if on_gpu else "1",
    }
    with patch.dict(os.environ, variables):
        yield


def devices() -> dict[str, Any]:
    """What tells a Trainer, or Fabric, where the ranks that run a job are."""
    if device().type == "cuda":
        return {"accelerator": "gpu", "devices": 1, "num_nodes": dist.get_world_size()}
    return {"accelerator": "cpu", "devices": dist.get_world_size()}


def make_trainer(strategy: Any, **options: Any) -> Trainer:
    """A quiet Trainer with one device per rank."""
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(strategy=strategy, **{**devices(), **quiet, **options})
