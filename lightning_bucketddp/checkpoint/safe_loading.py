"""Reading a checkpoint file: only if it is whole, and without running anything that is in it."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import os
import pathlib
import pickle
import sys
import tempfile
import types
import typing
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, BinaryIO

import numpy as np
import torch
from fsspec import AbstractFileSystem  # type: ignore[import-untyped]
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from lightning_bucketddp.checkpoint.errors import CheckpointReadError, UnsafeCheckpointError
from lightning_bucketddp.checkpoint.integrity import damage_in, is_archive, newest_intact_beside

_PATHS = [pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath]
_TYPES = [
    *[argparse.Namespace, types.SimpleNamespace, collections.defaultdict],
    *[datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone],
    *[decimal.Decimal, fractions.Fraction, uuid.UUID],
    *[bool, int, float, complex, str, list, tuple, dict, set, frozenset, range, slice],
    *[np.dtype, np.ndarray, *{type(np.dtype(code)) for code in np.typecodes["All"]}],
]
# By which numpy pickles scalars and arrays. They are private, so they are asked for and not imported.
_NUMPY_FUNCTIONS: list[Any] = [np.float64(0).__reduce__()[0], np.empty(0).__reduce__()[0]]
# Packages whose enumerations are as safe as those of the standard library.
_TRUSTED_ROOTS = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torch"}


def safe_globals_allowed() -> AbstractContextManager[None]:
    """Have `torch.load(weights_only=True)` take plain data types of Python, numpy and others in the block."""
    allowed = [*_TYPES, *_PATHS, *_under_other_names(), *_enumerations(), *_configurations()]
    # Torch removes at the end what it is given, and the user may have allowed some for good.
    by_user = torch.serialization.get_safe_globals()
    context: AbstractContextManager[None]
    context = torch.serialization.safe_globals([item for item in allowed if item not in by_user])
    return context


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


def _under_other_names() -> Iterator[Callable[..., Any]]:
    """Yield safe types under the names that other versions of numpy (before 2.0) and Python (3.13) have for them."""
    for function in _NUMPY_FUNCTIONS:
        for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            yield _renamed(function, module, function.__name__)
    for path in _PATHS:
        for module in {"pathlib", "pathlib._local"} - {path.__module__}:
            yield _renamed(path, module, path.__name__)


def _renamed(function: Callable[..., Any], module: str, name: str) -> Callable[..., Any]:
    def renamed(*args: Any) -> Any:
        return function(*args)

    # These are the names that torch looks up.
    renamed.__module__, renamed.__name__, renamed.__qualname__ = module, name, name
    return renamed


def read_checkpoint(path: str, *, map_location: Any, weights_only: bool | None) -> Any:
    """Return what the file at `path` holds. One that is damaged is refused before anything of it is loaded.

    Args:
        path: a local path or what fsspec takes.
        map_location: as `torch.load` takes it.
        weights_only: False runs whatever the file says. None means True, unless torch's own variable says otherwise.
    """
    filesystem, target = url_to_fs(path)
    if not filesystem.exists(target):
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    if weights_only is None:
        weights_only = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "").lower() not in ("1", "y", "yes", "true")
    with _opened(target, filesystem) as file:
        if (damage := damage_in(file)) is None:
            try:
                return _load(file, path, map_location=map_location, weights_only=weights_only)
            except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
                if isinstance(error, UnsafeCheckpointError) or not _is_about_the_file(error, file):
                    raise
                damage = f"it is cut short or damaged ({_first_line(error)})"
    raise CheckpointReadError(f"Cannot read checkpoint `{path}`: {damage}. {_advice(path, target, filesystem)}")


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


def _load(file: BinaryIO, path: str, *, map_location: Any, weights_only: bool) -> Any:
    with safe_globals_allowed() if weights_only else nullcontext():
        try:
            file.seek(0)
            return torch.load(file, map_location=map_location, weights_only=weights_only)
        except pickle.UnpicklingError as error:
            if not weights_only or (refused := _refused(error, file)) is None:
                raise
            raise UnsafeCheckpointError.holding(refused, path=path) from error


def _refused(error: Exception, file: BinaryIO) -> str | None:
    """Return what torch does not take, with all names if it can list them; None if the file is not even a pickle."""
    # Torch raises a page of advice in the place of the error that says it.
    reason = str(error.__context__ or error).partition(". Please")[0]
    if not is_archive(file):
        return reason if "GLOBAL" in reason else None
    with suppress(AttributeError, ValueError, pickle.UnpicklingError):  # not in torch 2.5, and not for every pickle
        file.seek(0)
        if names := torch.serialization.get_unsafe_globals_in_checkpoint(file):
            return ", ".join(sorted(names))
    return reason


def _is_about_the_file(error: Exception, file: BinaryIO) -> bool:
    """Return whether an error of torch's shows damage that `damage_in` cannot see, as in files without checksums."""
    if is_archive(file):
        return "PytorchStreamReader" in str(error)
    return not isinstance(error, RuntimeError) or "corrupt" in str(error)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__


def _advice(path: str, target: str, filesystem: AbstractFileSystem) -> str:
    if (intact := newest_intact_beside(target, filesystem)) is None:
        return "No intact checkpoint is beside it. Copy it again from where it came from, or resume from another one."
    intact = os.path.join(os.path.dirname(path), intact)
    return f"The newest intact checkpoint beside it is `{intact}`: resume from that one."
