"""Checkpoint files: written whole or not at all, read only if they are whole, without running what is in them."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import errno
import fractions
import hashlib
import os
import pathlib
import pickle
import sys
import tempfile
import types
import typing
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np
import torch
from fsspec import AbstractFileSystem  # type: ignore[import-untyped]
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from lightning_bucketddp.checkpoint.atomic_file import atomic_file
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.wording import list_some_ranks

if TYPE_CHECKING:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO as _TorchCheckpointIO
else:
    # Each of Lightning's two import roots has a `TorchCheckpointIO` of its own: it comes after this class in the bases.
    _TorchCheckpointIO = object


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


_ARCHIVE_START = b"PK\x03\x04"
_PICKLE_START = b"\x80"  # what `torch.save` wrote before its archives: it has no checksums
_DIRECTORY_ATTRIBUTE = 0x10
# Of the files beside a damaged one. Each may be gigabytes to read.
_MAX_TRIED = 10


def damage_in(file: BinaryIO) -> str | None:
    """Return what is wrong with `file`, in plain words; None if it looks complete and its checksums are right."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(24)
    if size == 0:
        return "it is empty (0 bytes)"
    if start.startswith(_PICKLE_START):
        return None
    if not start.startswith(_ARCHIVE_START[:size]):
        return f"it is not a checkpoint ({size:,} bytes that start with {start!r})"
    incomplete = f"it is cut short or damaged ({size:,} bytes that are not a complete archive)"
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.CRC == 0:
                    entry.CRC = None  # type: ignore[assignment]  # `torch.serialization.set_crc32_options(False)`
                if entry.external_attr & _DIRECTORY_ATTRIBUTE:
                    # Torch would read nothing, report nothing, and leave in the tensor what was in memory.
                    return incomplete
            damaged = archive.testzip()  # verifies the checksums, which torch does not
            return None if damaged is None else f"its record `{damaged}` is damaged (the checksum is wrong)"
    except OSError as error:
        if error.errno != errno.EINVAL:  # a damaged index leads to places that no file has
            raise
        return incomplete
    except Exception:
        # What a damaged index looks like is not only a `BadZipFile`: it may ask for a password.
        return incomplete


def damage_at(path: str, filesystem: AbstractFileSystem) -> str | None:
    """Return what is wrong with the file at `path`, in plain words; None: nothing."""
    try:
        with filesystem.open(path, "rb") as file:
            return damage_in(file)
    except OSError as error:
        return f"it cannot be read ({error})"


def newest_intact_beside(path: str, filesystem: AbstractFileSystem) -> str | None:
    """Return the name of the newest file without damage, among those beside `path` with its suffix; None: none is."""
    own_name, suffix = os.path.basename(path), os.path.splitext(path)[1]
    try:
        names = [str(name) for name in filesystem.ls(os.path.dirname(path), detail=False)]
        others = [it for it in names if os.path.splitext(it)[1] == suffix and filesystem.isfile(it)]
        others = [it for it in others if os.path.basename(it)[:1] != "." and os.path.basename(it) != own_name]
        newest_first = sorted(others, key=filesystem.modified, reverse=True)[:_MAX_TRIED]
    except (OSError, NotImplementedError):
        return None  # a server that does not list files, or has no times: only the advice is missing
    return next((os.path.basename(name) for name in newest_first if damage_at(name, filesystem) is None), None)


_PATHS = [pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath]
_TYPES = [
    *[argparse.Namespace, types.SimpleNamespace, collections.defaultdict],
    *[datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone],
    *[decimal.Decimal, fractions.Fraction, uuid.UUID],
    *[bool, int, float, complex, str, list, tuple, dict, set, frozenset, range, slice],
    *[np.dtype, np.ndarray, *{type(np.dtype(code)) for code in np.typecodes["All"]}],
]
# By which numpy pickles scalars and arrays. They are private, so they are not imported.
_NUMPY_FUNCTIONS: list[Any] = [np.float64(0).__reduce__()[0], np.empty(0).__reduce__()[0]]
# Packages whose enumerations are as safe as those of the standard library.
_TRUSTED_ROOTS = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torch"}


def _safe_globals_allowed() -> AbstractContextManager[None]:
    """Have `torch.load(weights_only=True)` accept plain data types of Python, numpy and others in the block."""
    # Other versions of numpy (before 2.0) and Python (3.13) have other names for these.
    modules = ("numpy.core.multiarray", "numpy._core.multiarray")
    renamed = [_renamed(function, module) for function in _NUMPY_FUNCTIONS for module in modules]
    for path in _PATHS:
        renamed += [_renamed(path, module) for module in {"pathlib", "pathlib._local"} - {path.__module__}]
    allowed = [*_TYPES, *_PATHS, *renamed, *_enumerations(), *_configurations()]
    # Torch removes these at the end, and the user may have allowed some for good.
    by_user = torch.serialization.get_safe_globals()
    return torch.serialization.safe_globals([item for item in allowed if item not in by_user])


def _enumerations() -> Iterator[type[enum.Enum]]:
    """Yield the enumerations that are imported: importing a module because a file names it could run anything."""
    found = [enum.Enum]
    while found:
        found += (kind := found.pop()).__subclasses__()
        root = kind.__module__.partition(".")[0]
        if len(kind) > 0 and (root in sys.stdlib_module_names or root in _TRUSTED_ROOTS):
            yield kind


def _configurations() -> list[Any]:
    """Return the types of an OmegaConf (and Hydra) configuration; Lightning saves those used as hyperparameters."""
    if (omegaconf := sys.modules.get("omegaconf")) is None:
        return []
    nodes = ["AnyNode", "BooleanNode", "BytesNode", "EnumNode", "FloatNode", "IntegerNode", "PathNode", "StringNode"]
    base = sys.modules["omegaconf.base"]
    return [
        *[omegaconf.DictConfig, omegaconf.ListConfig, base.ContainerMetadata, base.Metadata, typing.Any],
        *[getattr(omegaconf, node) for node in nodes],
    ]


def _renamed(function: Callable[..., Any], module: str) -> Callable[..., Any]:
    """Return `function` under its name in another module, which is what torch looks up."""

    def renamed(*args: Any) -> Any:
        return function(*args)

    renamed.__module__, renamed.__name__, renamed.__qualname__ = module, function.__name__, function.__name__
    return renamed


@contextmanager
def _opened(target: str, filesystem: AbstractFileSystem) -> Iterator[BinaryIO]:
    """Open the file, or a copy of a remote one: it is read twice, and must not change in between."""
    if isinstance(filesystem, LocalFileSystem):
        with open(target, "rb") as file:
            yield file
        return
    with tempfile.NamedTemporaryFile() as copy:
        filesystem.get_file(target, copy.name)
        with open(copy.name, "rb") as file:
            yield file


def _load(file: BinaryIO, path: str, *, map_location: Any, weights_only: bool) -> dict[str, Any]:
    with _safe_globals_allowed() if weights_only else nullcontext():
        try:
            file.seek(0)
            return torch.load(file, map_location=map_location, weights_only=weights_only)  # type: ignore[no-any-return]
        except pickle.UnpicklingError as error:
            if not weights_only or (refused := _refused(error, file)) is None:
                raise
            raise UnsafeCheckpointError(
                f"Checkpoint `{path}` is not loaded, because it holds more than `weights_only=True` accepts: {refused}."
                " Nothing in it was run. If you trust the file, pass `weights_only=False` (before Lightning 2.6: set"
                " TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1) or name its types to `torch.serialization.add_safe_globals`."
            ) from error


def _refused(error: Exception, file: BinaryIO) -> str | None:
    """Return what torch refuses, with all names if it can list them; None if the file is not even a pickle."""
    # Torch raises a page of advice in the place of the error with the reason.
    reason = str(error.__context__ or error).partition(". Please")[0]
    if not _is_archive(file):
        return reason if "GLOBAL" in reason else None
    with suppress(AttributeError, ValueError, pickle.UnpicklingError):  # not in torch 2.5, and not for every pickle
        file.seek(0)
        if names := torch.serialization.get_unsafe_globals_in_checkpoint(file):
            return ", ".join(sorted(names))
    return reason


def _is_archive(file: BinaryIO) -> bool:
    """Return whether `file` begins as what `torch.save` writes since torch 1.6."""
    file.seek(0)
    return file.read(len(_ARCHIVE_START)) == _ARCHIVE_START


class AtomicCheckpointIO(_TorchCheckpointIO):
    """Replaces files atomically; a failed write keeps the old file, and its error names path and cause."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            super().save_checkpoint(checkpoint, str(path), storage_options)  # refuses them
            return
        # Lightning's own drops a PermissionError of a remote file system (2.6) and reports success.
        with CheckpointWriteError.raised_for(path), atomic_file(str(path)) as file:
            torch.save(checkpoint, file)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = lambda storage, _: storage,  # Lightning's default: as torch reads it, in host memory
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return what the file holds. One that is damaged is refused before anything of it is loaded.

        Args:
            path: a local path or what fsspec takes.
            map_location: as `torch.load` takes it.
            weights_only: False runs code in the file. None is True, unless torch's own variable is set.
        """
        path = str(path)
        filesystem, target = url_to_fs(path)
        if not filesystem.exists(target):
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        if weights_only is None:
            unsafe = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "").lower()
            weights_only = unsafe not in ("1", "y", "yes", "true")
        with _opened(target, filesystem) as file:
            if (damage := damage_in(file)) is None:
                try:
                    return _load(file, path, map_location=map_location, weights_only=weights_only)
                except UnsafeCheckpointError:
                    raise
                except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
                    # `damage_in` cannot find damage in files without checksums.
                    text, is_damaged = str(error), not isinstance(error, RuntimeError) or "corrupt" in str(error)
                    if not ("PytorchStreamReader" in text if _is_archive(file) else is_damaged):
                        raise
                    reason = ": ".join([type(error).__name__, *text.splitlines()[:1]])
                    damage = f"it is cut short or damaged ({reason})"
        advice = "No intact checkpoint is beside it. Copy it again from where it came from, or resume from another one."
        if (name := newest_intact_beside(target, filesystem)) is not None:
            intact = os.path.join(os.path.dirname(path), name)
            advice = f"The newest intact checkpoint beside it is `{intact}`: resume from that one."
        raise CheckpointReadError(f"Cannot read checkpoint `{path}`: {damage}. {advice}")


_Checkpoint = TypeVar("_Checkpoint")
_CHUNK_BYTES = 2**20


def write_on_rank_zero(
    write: Callable[[], None],
    collectives: Collectives | None,
    *,
    path: str | os.PathLike[str] | None = None,
    is_saver: bool | None = None,
) -> None:
    """Call `write` on rank zero; if it raises an `Exception`, raise on every rank. All ranks must call this.

    Once the process group is gone, after a failure of some rank, one rank writes and the others do nothing: the one
    where `is_saver`, else rank zero. `collectives` is None when there are no other ranks.
    """
    if collectives is None or not collectives.is_open:
        if collectives is None or (collectives.rank == 0 if is_saver is None else is_saver):
            write()
        return
    if collectives.rank == 0:
        try:
            write()
        except Exception as error:
            failure = CheckpointWriteError.because(error, path=path)
            collectives.broadcast_json({"message": str(failure), "errno": failure.errno})
            raise
    if (on_rank_zero := collectives.broadcast_json(None)) is not None:
        raise CheckpointWriteError(f"{on_rank_zero['message']} (on rank 0)", errno=on_rank_zero["errno"])


def read_on_every_rank(
    read: Callable[[], _Checkpoint], collectives: Collectives, *, path: str | os.PathLike[str]
) -> _Checkpoint:
    """Call `read`; raise on every rank if it raises on any, or if they differ in files. All ranks must call this."""
    try:
        checkpoint = read()
        content = fingerprint(str(path), reads_remote=False)
    except Exception as error:
        is_ours = isinstance(error, CheckpointReadError)
        text = str(error) if is_ours else f"Cannot read checkpoint `{path}`: {type(error).__name__}: {error}"
        collectives.gather_json({"path": str(path), "error": text})
        raise
    _raise_difference(collectives.gather_json({"path": str(path), "content": content}))
    return checkpoint


def read_nowhere(collectives: Collectives) -> None:
    """Take part in `read_on_every_rank` of other ranks, with nothing to read on this one."""
    _raise_difference(collectives.gather_json({"path": None}))


def _raise_difference(outcomes: list[dict[str, Any]]) -> None:
    """Raise if the `outcomes`, by rank, are errors on some ranks or different files."""
    if failed := [rank for rank, outcome in enumerate(outcomes) if "error" in outcome]:
        raise CheckpointReadError(f"{outcomes[failed[0]]['error']} (on {list_some_ranks(failed)})")
    without = [rank for rank, outcome in enumerate(outcomes) if outcome["path"] is None]
    if 0 < len(without) < len(outcomes):
        path = next(outcome["path"] for outcome in outcomes if outcome["path"] is not None)
        raise CheckpointReadError(
            f"There is a checkpoint `{path}` to resume from, but not on {list_some_ranks(without)}. Save where"
            " all hosts can read, or copy it to every host."
        )
    other = [rank for rank, outcome in enumerate(outcomes) if outcome.get("content") != outcomes[0].get("content")]
    if other:
        raise CheckpointReadError(
            f"The checkpoint `{outcomes[0]['path']}` of rank 0 is another one than `{outcomes[other[0]]['path']}` of"
            f" {list_some_ranks(other)}: the files differ. Save where all hosts can read, or copy one file to every"
            " host."
        )


def fingerprint(path: str, *, reads_remote: bool = True) -> str | None:
    """Return a fingerprint of the content of a file; None for what is not a file.

    Only the checksums in an archive are read. Unless `reads_remote`, what is not a local file has none.
    """
    filesystem, target = url_to_fs(path)
    if not (reads_remote or isinstance(filesystem, LocalFileSystem)) or not filesystem.isfile(target):
        return None
    with filesystem.open(target, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                entries = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
            return hashlib.sha256(repr(entries).encode()).hexdigest()
        except zipfile.BadZipFile:  # an older file, or one of a user's own plugin
            checksum = 0
            file.seek(0)
            while chunk := file.read(_CHUNK_BYTES):
                checksum = zlib.crc32(chunk, checksum)
            return f"{checksum:08x}"
