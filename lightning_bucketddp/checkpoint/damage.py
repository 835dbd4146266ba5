"""What is wrong with a checkpoint file."""

from __future__ import annotations

import errno
import os
import zipfile
from collections.abc import Iterator
from typing import BinaryIO

from lightning_bucketddp.checkpoint.outline import tensor_names

_ARCHIVE_START = b"PK\x03\x04"
_PICKLE_START = b"\x80"  # what `torch.save` wrote before its archives; nothing in it tells that it is complete
_CHUNK_BYTES = 2**20
_DIRECTORY_ATTRIBUTE = 0x10
_MAX_NAMES_SHOWN = 3


def is_archive(file: BinaryIO) -> bool:
    """Whether `file` begins as what `torch.save` writes since torch 1.6."""
    return _start(file, len(_ARCHIVE_START)) == _ARCHIVE_START


def damage_in(file: BinaryIO) -> str | None:
    """What is wrong with `file`, in plain words; None if it looks complete and its checksums are right."""
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
            damaged = list(_damaged_records(archive))
            return f"{_in_words(damaged, archive)} damaged (the checksum is wrong)" if damaged else None
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
    """The records whose content does not have the checksum that is stored for it. Torch itself does not look."""
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


def _in_words(records: list[str], archive: zipfile.ZipFile) -> str:
    """What the `records` hold, with the verb that follows."""
    folder = records[0].partition("/")[0]
    names: dict[str, str] = {}
    if f"{folder}/data.pkl" not in records:
        names = tensor_names(archive.read(f"{folder}/data.pkl"))
    shown = [
        f"the tensor `{names[key]}`" if (key := record.rpartition("/")[2]) in names else f"the record `{record}`"
        for record in records[:_MAX_NAMES_SHOWN]
    ]
    if len(records) > len(shown):
        shown.append(f"{len(records) - len(shown)} more")
    return f"{', '.join(shown)} {'is' if len(records) == 1 else 'are'}"
