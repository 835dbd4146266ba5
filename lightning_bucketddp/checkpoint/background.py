"""Checkpoints that are written in the background, by Lightning's `AsyncCheckpointIO` or a plugin like it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO


def drain(checkpoint_io: CheckpointIO) -> None:
    """Wait for the writes in the background and raise what went wrong in them.

    `teardown` is where plugins do so. Lightning calls it after every fit, validate, test and predict, so that one
    more call is nothing new to them.
    """
    with raised_once(checkpoint_io):
        checkpoint_io.teardown()


@contextmanager
def raised_once(checkpoint_io: CheckpointIO) -> Iterator[None]:
    """Let an error of `checkpoint_io` pass and make it forget what failed in the background.

    `AsyncCheckpointIO` would raise it again, on rank zero only: from the trainer's teardown, which then stops
    half-way, and from the first save of the next fit.
    """
    try:
        yield
    except BaseException:
        with suppress(Exception):
            checkpoint_io.teardown()  # a second write may be waiting, to fail for the same reason
        if getattr(checkpoint_io, "_error", None) is not None:
            checkpoint_io._error = None  # type: ignore[attr-defined]
        raise
