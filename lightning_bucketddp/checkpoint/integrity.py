"""Finding damage in a checkpoint file, and an intact one beside it. Nothing in the file is run."""

from __future__ import annotations

import errno
import os
import zipfile
from collections.abc import Iterator
from typing import BinaryIO

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

_ARCHIVE_START = b"PK\x03\x04"
_PICKLE_START = b"\x80"  # what `torch.save` wrote before its archives; nothing in it tells that it is complete
_CHUNK_BYTES = 2**20
_DIRECTORY_ATTRIBUTE = 0x10
# Of the files beside a damaged one. Each may be gigabytes to read.
_MAX_TRIED = 10


def is_archive(file: BinaryIO) -> bool:
    """Return whether `file` begins as what `torch.save` writes since torch 1.6."""
    return _start(file, len(_ARCHIVE_START)) == _ARCHIVE_START


def damage_in(file: BinaryIO) -> str | None:
    """Return what is wrong with `file`, in plain words; None if it looks complete and its checksums are right."""
    size = file.seek(0, os.SEEK_END)
    start = _start(file, 24)
    if size == 0:
        return "it is empty (0 bytes)"
    if start.startswith(_PICKLE_START):
        return None
    if not start.startswith(_ARCHIVE_START[:size]):
        return f"it is not a checkpoint ({size:,} bytes that start with {start!r})"
    incomplete = f"it is cut short or damaged ({size:,} bytes that are not a complete archive)"
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = next(_damaged_records(archive), None)
            return None if damaged is None else f"its record `{damaged}` is damaged (the checksum is wrong)"
    except OSError as error:
        if error.errno != errno.EINVAL:  # a damaged index leads to places that no file has
            raise
        return incomplete
    except Exception:
        # What a damaged index looks like is not only a `BadZipFile`: it may ask for a password.
        return incomplete


def _start(file: BinaryIO, num_bytes: int) -> bytes:
    file.seek(0)
    return file.read(num_bytes)


def _damaged_records(archive: zipfile.ZipFile) -> Iterator[str]:
    """Yield the records whose content does not have the checksum that is stored for it. Torch itself does not look."""
    for entry in archive.infolist():
        if entry.CRC == 0:
            entry.CRC = None  # type: ignore[assignment]  # `torch.serialization.set_crc32_options(False)`
        if entry.external_attr & _DIRECTORY_ATTRIBUTE:
            # Torch would read nothing then, say nothing, and leave in the tensor what was in memory.
            raise zipfile.BadZipFile
        with archive.open(entry) as record:
            try:
                while record.read(_CHUNK_BYTES):
                    pass
            except zipfile.BadZipFile:
                yield entry.filename


def newest_intact_beside(path: str, filesystem: AbstractFileSystem) -> str | None:
    """Return the name of the newest file without damage, among those beside `path` with its suffix; None: none is."""
    try:
        names = filesystem.ls(os.path.dirname(path), detail=False)
        others = [name for name in names if _is_candidate(name, path) and filesystem.isfile(name)]
        for name in sorted(others, key=filesystem.modified, reverse=True)[:_MAX_TRIED]:
            with filesystem.open(name) as file:
                if damage_in(file) is None:
                    return os.path.basename(str(name))
    except (OSError, NotImplementedError):
        pass  # a server that lists nothing, or does not know when: all that is missing then is advice
    return None


def _is_candidate(name: str, path: str) -> bool:
    base = os.path.basename(name)
    is_same = os.path.basename(path) == base
    return not is_same and not base.startswith(".") and os.path.splitext(base)[1] == os.path.splitext(path)[1]
