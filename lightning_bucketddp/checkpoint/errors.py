"""What goes wrong with a checkpoint, in words that name the file."""

from __future__ import annotations

import os


class CheckpointWriteError(OSError):
    """A checkpoint was not written; `errno` is the cause's, where it has one."""

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno

    @classmethod
    def because(cls, cause: Exception, *, path: str | os.PathLike[str] | None) -> CheckpointWriteError:
        """The error for `path` (None: not known); a `cause` that is one already is returned as it is."""
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


class CheckpointReadError(RuntimeError):
    """A checkpoint is there but damaged."""
