"""Errors of writing and reading checkpoints, which name the file."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager


class CheckpointWriteError(OSError):
    """A checkpoint was not written; `errno` is the cause's, where it has one."""

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno

    @classmethod
    def because(cls, cause: Exception, *, path: str | os.PathLike[str] | None) -> CheckpointWriteError:
        """Return the error for `path` (None: not known); a `cause` that is one already is returned as it is."""
        if isinstance(cause, cls):
            return cause
        checkpoint = "a checkpoint" if path is None else f"checkpoint `{path}`"
        if not isinstance(cause, OSError):
            return cls(f"Could not write {checkpoint}: {type(cause).__name__}: {cause}")
        return cls(
            f"Could not write {checkpoint}: {cause.strerror or cause}. Check the free space, the quota and the"
            " permissions of its directory, or save to another one.",
            errno=cause.errno,
        )

    @classmethod
    @contextmanager
    def raised_for(cls, path: str | os.PathLike[str]) -> Iterator[None]:
        """Raise exceptions in the block as errors about writing `path`."""
        try:
            yield
        except cls:
            raise
        except Exception as error:
            raise cls.because(error, path=path) from error


class CheckpointReadError(RuntimeError):
    """A checkpoint is there but cannot be used: it is damaged, unsafe, or not the same on all ranks."""


class UnsafeCheckpointError(CheckpointReadError, pickle.UnpicklingError):
    """A checkpoint holds more than data; it is an `UnpicklingError` because that is what torch raises."""

    @classmethod
    def holding(cls, refused: str, *, path: str | os.PathLike[str]) -> UnsafeCheckpointError:
        """Return the error for a file at `path` with something in it that is not data."""
        return cls(
            f"Checkpoint `{path}` is not loaded, because it holds more than `weights_only=True` accepts: {refused}."
            " Nothing in it was run. If you trust the file, pass `weights_only=False` (before Lightning 2.6: set"
            " TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1) or name its types to `torch.serialization.add_safe_globals`."
        )
