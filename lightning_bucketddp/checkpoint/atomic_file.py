"""A file that appears under its name complete, or not at all.

Several runs may write into one directory, from several hosts, so a temporary file is removed only when its writer is
surely gone. Its name identifies the writer: the process by its number and start time, and the scope of that number (one
boot of one kernel, one container). A process of our own scope that is not there any more has ended. Files of other
scopes are removed when they have not been written to for an hour. If their writer lives all the same, its save fails
with an error that names the path; what it has saved before is not touched. Locks do not work: on network file systems
they may be missing or hang, and forked loader workers would hold one for a trainer that was killed.
"""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from lightning_bucketddp.processes import is_running, pid_scope, process_start_time

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# By the clock of the file system. The longest silence of a writer is the flush of its file to slow storage.
_ABANDONED_AFTER_S = 3600.0

# The file of the rank that saves for all ranks. It holds the name of a temporary file, which identifies its writer.
_CLAIM = ".bucketddp-saver-{}"
_CLAIM_NAME = re.compile(r"\.bucketddp-saver-[0-9a-f]{16}")
_NAME = re.compile(r"\.bucketddp-([0-9a-f]{16})-(\d{1,9})-(\d+)-[0-9a-f]{8}\.tmp")


def temporary_name() -> str:
    """Return a new, hidden file name that identifies its writer; short, whatever the name of the checkpoint."""
    return f".bucketddp-{pid_scope()}-{os.getpid()}-{process_start_time(os.getpid())}-{secrets.token_hex(4)}.tmp"


def find_temporary_files(directory: str) -> list[Path]:
    """Return the temporary files in `directory`, whether their writers are gone or not."""
    with suppress(OSError):
        paths = list(Path(directory).iterdir())
        return [path for path in paths if _NAME.fullmatch(path.name) or _CLAIM_NAME.fullmatch(path.name)]
    return []


def claim_file(directory: str, name: str) -> bool:
    """Return whether this process is the first to claim `name`, of 16 hex digits, in `directory`.

    The file that holds the claim is removed by a later save, when this process is gone.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        with open(os.path.join(directory, _CLAIM.format(name)), "x") as file:
            file.write(temporary_name())
    except FileExistsError:
        return False
    except OSError:
        pass  # nothing can be written there: the save will raise that
    return True


def remove_abandoned_files(directory: str, *, now: float) -> None:
    """Remove the temporary files in `directory` whose writers are gone, where that is possible.

    `now` is the time by the clock of the file system.
    """
    own_scope = pid_scope()
    for path in find_temporary_files(directory):
        with suppress(OSError):
            writer = _NAME.fullmatch(path.read_text() if _CLAIM_NAME.fullmatch(path.name) else path.name)
            scope, pid, start_time = writer.groups() if writer else ("", "", "")
            is_gone = scope == own_scope and not is_running(int(pid), start_time=int(start_time))
            if is_gone or now - path.lstat().st_mtime > _ABANDONED_AFTER_S:
                path.unlink()


class _TemporaryFile(io.FileIO):
    """Keeps the first write error: on a full disk `torch.save` replaces it by one about an unexpected position."""

    write_error: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.write_error = self.write_error or error
            raise


@contextmanager
def atomic_file(path: str) -> Iterator[BinaryIO]:
    """Open a new file to write into, which takes the place of `path` on disk when the block ends without an error.

    If `path` is a symbolic link, the link is replaced: what it points to may be a checkpoint that the user keeps. What
    fsspec takes for a remote path is written in one transaction.
    """
    filesystem, path = url_to_fs(path)
    directory = os.path.dirname(path)
    if not isinstance(filesystem, LocalFileSystem):
        content = io.BytesIO()
        yield content
        filesystem.makedirs(directory, exist_ok=True)
        with filesystem.transaction:
            filesystem.pipe_file(path, content.getvalue())
        return
    if os.path.exists(path) and not os.path.isfile(path):
        # A rename would put a plain file in the place of /dev/null too.
        raise OSError(errno.EEXIST, "something that is not a file has this name")
    with suppress(FileExistsError):  # opening below a file reports it better
        os.makedirs(directory)
    # In the same directory, because a rename between file systems is a copy. Files of `tempfile` can only be read by
    # their owner.
    temporary = _TemporaryFile(os.path.join(directory, temporary_name()), "xb")
    try:
        with io.BufferedWriter(temporary) as file:
            # Before anything is written, which may need their space.
            remove_abandoned_files(directory, now=os.fstat(file.fileno()).st_mtime)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary.name, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary.name)
        if isinstance(error, Exception) and temporary.write_error is not None:
            raise temporary.write_error from None
        raise
    # Makes the rename durable. Some network file systems refuse to; the file is complete either way.
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
