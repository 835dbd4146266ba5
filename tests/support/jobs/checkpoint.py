"""Checkpoint files with a number, and jobs that save them in a process of their own."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import torch

from lightning_bucketddp.checkpoint.async_writer import CheckpointWriter
from lightning_bucketddp.checkpoint.atomic_file import atomic_file
from lightning_bucketddp.checkpoint.checkpoint_io import AtomicCheckpointIO


def numbered_checkpoint(number: int) -> dict[str, Any]:
    """A few megabytes in several tensors that all say `number`."""
    return {"number": number, "state_dict": {f"layer{i}": torch.full((250_000,), float(number)) for i in range(4)}}


def number_in(path: str) -> int:
    """The number of the checkpoint at `path`, all of whose tensors agree on it."""
    checkpoint = torch.load(path, weights_only=True)
    number: int = checkpoint["number"]
    assert all(bool((tensor == number).all()) for tensor in checkpoint["state_dict"].values())
    return number


def save_numbered(number: int, path: str) -> None:
    AtomicCheckpointIO().save_checkpoint(numbered_checkpoint(number), path)


# In a process of its own. The first argument is the pipe on which it reports.


def save_for_ever(pipe: Connection, path: str, first: int, in_background: bool, tmpdir: str) -> None:
    """Save checkpoints numbered from `first` on, and report each once `save` has returned, until killed."""
    os.environ["TMPDIR"] = tmpdir
    tempfile.tempdir = None  # ask the variable again
    writer = CheckpointWriter()
    write = partial(AtomicCheckpointIO().save_checkpoint, path=path)
    number = first
    while True:
        writer.save(numbered_checkpoint(number), write, path=path, in_background=in_background)
        pipe.send(number)
        number += 1


def save_slowly(pipe: Connection, path: str, resume: Event) -> None:
    """Begin to write checkpoint number 7, report, and end it when told to."""
    with atomic_file(path) as file:
        file.write(b"a part of it")
        file.flush()
        pipe.send("begun")
        resume.wait()
        file.seek(0)
        torch.save(numbered_checkpoint(7), file)
    pipe.send("saved")
