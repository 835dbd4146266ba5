"""A Trainer for jobs that run on ranks."""

from __future__ import annotations

import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning_utilities.core import rank_zero

import lightning_bucketddp  # noqa: F401  (jobs need no installed package; scripts do)
from tests.support.ranks import device, run_on_ranks

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
    """A quiet Trainer with one device per rank of a job, or with the `devices` that it is given, of the CPU."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    place = {"accelerator": "cpu"} if "devices" in options else devices()
    return Trainer(strategy=strategy, **{**place, **quiet, **options})


def ours_and_ddp(job: Callable[..., Any], **options: Any) -> tuple[list[Any], list[Any]]:
    """What `job` returns on each rank with `strategy="bucketddp"`, and with `strategy="ddp"`."""
    ours, ddp = (run_on_ranks(job, strategy=strategy, **options) for strategy in ("bucketddp", "ddp"))
    return ours, ddp


@contextmanager
def workers_allowed() -> Iterator[None]:
    """Let a process of the pool, which ends with the tests, start workers, which end with the training."""
    with patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        yield


@contextmanager
def said_about(subject: str, lines: list[str]) -> Iterator[None]:
    """Collect what is said about `subject`, in the log and as warnings, beside that it was set."""

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = unwrapped(record.getMessage())
            if subject in message and f"{subject}=" not in message:
                lines.append(message)

    handler = Collect()
    rank_zero.log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        rank_zero.log.removeHandler(handler)
    lines.extend(unwrapped(str(warning.message)) for warning in caught if subject in str(warning.message))


def unwrapped(text: str) -> str:
    """A text of the log, before `wording.wrap` has made several lines of it."""
    return text.replace("\n  ", " ")


@contextmanager
def lines_logged(*names: str, level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collect what loggers with these names are told, from `level` on, each text in one line."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(unwrapped(record.getMessage()))  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(level)
    try:
        yield lines
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(before)
