"""The names of the tensors in a checkpoint, without loading any."""

from __future__ import annotations

import io
import pickle
from typing import Any


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
    def find_class(self, module: str, name: str) -> Any:
        return dict if (module, name) == ("collections", "OrderedDict") else _Anything

    def persistent_load(self, pid: Any) -> Any:
        return _Record(pid[2])


def tensor_names(pickled: bytes) -> dict[str, str]:
    """Where in a checkpoint the tensors are, by the last part of the name of the record that holds them.

    Args:
        pickled: the record `data.pkl`. What cannot be read has no names.
    """
    names: dict[str, str] = {}
    try:
        _collect(_Outline(io.BytesIO(pickled)).load(), (), names)
    except Exception:
        return {}
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
