"""The types that a checkpoint may hold besides tensors and plain data: making one runs nothing that a file says."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import pathlib
import sys
import types
import typing
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

_PATHS = [pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath]
_TYPES = [
    *[argparse.Namespace, types.SimpleNamespace, collections.defaultdict],
    *[datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone],
    *[decimal.Decimal, fractions.Fraction, uuid.UUID],
    *[bool, int, float, complex, str, list, tuple, dict, set, frozenset, range, slice],
    *[np.dtype, np.ndarray, *{type(np.dtype(code)) for code in np.typecodes["All"]}],
]
# What numpy pickles scalars and arrays by. Functions of its own, so they are asked for and not imported.
_NUMPY_FUNCTIONS: list[Any] = [np.float64(0).__reduce__()[0], np.empty(0).__reduce__()[0]]
# Whose enumerations are as harmless as those of the standard library.
_TRUSTED_ROOTS = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torch"}


def harmless_types_allowed() -> AbstractContextManager[None]:
    """A context in which `torch.load(weights_only=True)` takes harmless types too."""
    allowed = [*_TYPES, *_PATHS, *_under_other_names(), *_enumerations(), *_configurations()]
    # Torch removes at the end what it is given, and the user may have allowed some for good.
    by_user = torch.serialization.get_safe_globals()
    context: AbstractContextManager[None] = torch.serialization.safe_globals(
        [item for item in allowed if item not in by_user]
    )
    return context


def _enumerations() -> Iterator[type[enum.Enum]]:
    """Those that are imported: importing a module because a file names it could run anything."""
    found = [enum.Enum]
    while found:
        found += (kind := found.pop()).__subclasses__()
        root = kind.__module__.partition(".")[0]
        if len(kind) > 0 and (root in sys.stdlib_module_names or root in _TRUSTED_ROOTS):
            yield kind


def _configurations() -> list[Any]:
    """What OmegaConf, and so Hydra, makes a configuration of; Lightning saves one that is used as hyperparameters."""
    if (omegaconf := sys.modules.get("omegaconf")) is None:
        return []
    nodes = ["AnyNode", "BooleanNode", "BytesNode", "EnumNode", "FloatNode", "IntegerNode", "PathNode", "StringNode"]
    base = sys.modules["omegaconf.base"]
    return [
        *[omegaconf.DictConfig, omegaconf.ListConfig, base.ContainerMetadata, base.Metadata, typing.Any],
        *[getattr(omegaconf, node) for node in nodes],
    ]


def _under_other_names() -> Iterator[Callable[..., Any]]:
    """What numpy before and after 2.0, and Python 3.13 and others, call differently."""
    for function in _NUMPY_FUNCTIONS:
        for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            yield _renamed(function, module, function.__name__)
    for path in _PATHS:
        for module in {"pathlib", "pathlib._local"} - {path.__module__}:
            yield _renamed(path, module, path.__name__)


def _renamed(function: Callable[..., Any], module: str, name: str) -> Callable[..., Any]:
    def renamed(*args: Any) -> Any:
        return function(*args)

    # By which torch finds it.
    renamed.__module__, renamed.__name__, renamed.__qualname__ = module, name, name
    return renamed
