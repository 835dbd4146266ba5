"""A file that appears under its name complete, or not at all."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO

from lightning_bucketddp.checkpoint.leftovers import remove_leftovers, temporary_name

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


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
    """A new file to write into, which takes the place of `path` on disk when the block ends without an error.

    If `path` is a symbolic link, the link is replaced: what it points to may be a checkpoint that someone keeps.
    """
    path = os.path.abspath(path)
    directory = os.path.dirname(path)
    if os.path.exists(path) and not os.path.isfile(path):
        # A rename would put a plain file in the place of /dev/null too.
        raise OSError(errno.EEXIST, "something that is not a file has this name")
    with suppress(FileExistsError):  # a file in the place of the directory is reported better by opening below it
        os.makedirs(directory)
    # In the same directory, because a rename between file systems is a copy; not by `tempfile`, whose files only
    # their owner can read.
    temporary = _TemporaryFile(os.path.join(directory, temporary_name()), "xb")
    try:
        with io.BufferedWriter(temporary) as file:
            # Before anything is written: they may take the space that it needs.
            remove_leftovers(directory, now=os.fstat(file.fileno()).st_mtime)
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
    _make_rename_durable(directory)


def _make_rename_durable(directory: str) -> None:
    # Some network file systems refuse to; the file is complete either way.
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
