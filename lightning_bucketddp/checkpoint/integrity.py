"""Finding damage in a checkpoint file, and an intact one beside it. Nothing in the file is run."""

from __future__ import annotations

import errno
import io
import os
import pickle
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

_ARCHIVE_START = b"PK\x03\x04"
_PICKLE_START = b"\x80"  # what `torch.save` wrote before its archives; nothing in it tells that it is complete
_CHUNK_BYTES = 2**20
_DIRECTORY_ATTRIBUTE = 0x10
_MAX_NAMES_SHOWN = 3
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
            damaged = list(_damaged_records(archive))
            return f"{_describe(damaged, archive)} damaged (the checksum is wrong)" if damaged else None
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


def _describe(records: list[str], archive: zipfile.ZipFile) -> str:
    """Return what the `records` hold, with the verb that follows."""
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


class _Record(str):
    """Where the content of a tensor is: the last part of the name of its record."""


class _Anything:
    """Takes the place of every type and function that a pickle names: nothing of it is imported or called."""

    parts: tuple[Any, ...]

    def __new__(cls, *args: Any) -> _Anything:
        anything = super().__new__(cls)
        anything.parts = args
        return anything

    def append(self, part: Any) -> None:
        self.parts = (*self.parts, part)

    def __setstate__(self, state: Any) -> None:
        self.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.append({key: value})


class _Outline(pickle.Unpickler):
    """Reads where tensors are, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        return dict if (module, name) == ("collections", "OrderedDict") else _Anything

    def persistent_load(self, pid: Any) -> Any:
        return _Record(pid[2])


def tensor_names(pickled: bytes) -> dict[str, str]:
    """Return where in a checkpoint's `data.pkl` the tensors are, by the last part of the name of their records."""
    names: dict[str, str] = {}
    try:
        _collect(_Outline(io.BytesIO(pickled)).load(), (), names)
    except Exception:
        return {}  # what cannot be read has no names
    return names


def _collect(value: Any, place: tuple[str, ...], names: dict[str, str]) -> None:
    if isinstance(value, _Record):
        names.setdefault(value, ".".join(place))
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(item, (*place, str(key)), names)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _collect(item, (*place, str(index)), names)
    elif isinstance(value, tuple):
        for item in value:
            _collect(item, place, names)
    elif isinstance(value, _Anything):
        parts, value.parts = value.parts, ()  # an object may hold itself
        _collect(parts, place, names)
