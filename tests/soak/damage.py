"""A bit of a checkpoint file that a disk has lost."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

_LOCAL_HEADER_BYTES = 30


def flip_bit(path: Path, *, place: float, bit: int) -> None:
    """Flip `bit` of a byte of the largest tensor of the checkpoint at `path`; `place` is from 0 to 1."""
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda info: ("/data/" in info.filename, info.file_size))
    with path.open("r+b") as file:
        file.seek(record.header_offset)
        # The lengths of the name and of what follows it, which is padding.
        name, extra = struct.unpack_from("<HH", file.read(_LOCAL_HEADER_BYTES), 26)
        position = record.header_offset + _LOCAL_HEADER_BYTES + name + extra + int(place * record.file_size)
        file.seek(position)
        [value] = file.read(1)
        file.seek(position)
        file.write(bytes([value ^ (1 << bit)]))
