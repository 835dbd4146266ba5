"""What is wrong with a checkpoint file that cannot be read."""

from __future__ import annotations

import os
import zipfile

import fsspec  # type: ignore[import-untyped]

_ARCHIVE_START = b"PK\x03\x04"
_PICKLE_START = b"\x80"  # what `torch.save` wrote before its archives; nothing at its end tells that it is complete


def damage_of(path: str | os.PathLike[str]) -> str | None:
    """What is wrong with the file at `path`, in plain words; None if it looks complete."""
    with fsspec.open(str(path)) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        start = file.read(24)
        if size == 0:
            return "it is empty (0 bytes)"
        if start.startswith(_PICKLE_START):
            return None
        if not start.startswith(_ARCHIVE_START[:size]):
            return f"it is not a checkpoint ({size:,} bytes that start with {start!r})"
        try:
            # Opening reads the index at the end of the archive and the header of each entry, not the content.
            with zipfile.ZipFile(file) as archive:
                for entry in archive.infolist():
                    archive.open(entry).close()
        except zipfile.BadZipFile:
            return f"it is cut short or damaged ({size:,} bytes that are not a complete archive)"
    return None
