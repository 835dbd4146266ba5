"""A module that a command line names: `my_project.models:LitNet`, and what its constructor gets."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from lightning_bucketddp.usage import UsageError


@dataclass(frozen=True, slots=True)
class NamedModule:
    """A class, and arguments with which it can be made."""

    kind: type[nn.Module]
    arguments: dict[str, Any]

    @classmethod
    def find(cls, name: str, arguments: Sequence[str]) -> NamedModule:
        """The class `MODULE:CLASS`; `arguments` are JSON objects or `key=value`."""
        kind = _find_class(name)
        given = _parse(arguments)
        _check_arguments(kind, given)
        return cls(kind, given)

    def without_memory(self) -> nn.Module:
        """The module with parameters that have sizes and no content, if it can be made so."""
        try:
            return self._make("meta")
        except Exception:  # whatever its constructor does may need real tensors
            return self.make()

    def make(self) -> nn.Module:
        """The module itself, in the memory of the host."""
        try:
            return self._make("cpu")
        except Exception as error:
            raise UsageError(f"{self.kind.__name__} cannot be made: {_first_line(error)}") from error

    def _make(self, device: str) -> nn.Module:
        with torch.device(device):
            module = self.kind(**self.arguments)
            configure = getattr(module, "configure_model", None)  # a LightningModule's
            if callable(configure):
                configure()
        return module


def _find_class(name: str) -> type[nn.Module]:
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise UsageError(f"{name!r} names no class. Write MODULE:CLASS, for example my_project.models:LitNet.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(f"Importing {module_name} failed: {_first_line(error)}") from error
        raise UsageError(
            f"There is no module {error.name!r}. Run the command in the folder of your project, or set PYTHONPATH."
        ) from error
    except Exception as error:
        raise UsageError(f"Importing {module_name} failed: {_first_line(error)}") from error
    found = getattr(module, class_name, None)
    if found is None:
        classes = [n for n, v in vars(module).items() if _is_module_class(v) and v.__module__ == module_name]
        raise UsageError(f"{module_name} has no {class_name!r}. It has {', '.join(classes) or 'no modules'}.")
    if not _is_module_class(found):
        raise UsageError(f"{name} is no LightningModule and no torch.nn.Module, but {found!r:.80}.")
    kind: type[nn.Module] = found
    return kind


def _is_module_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _parse(arguments: Sequence[str]) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for argument in arguments:
        if argument.lstrip().startswith("{"):
            try:
                parsed |= json.loads(argument)
            except ValueError as error:
                raise UsageError(f"--args {argument} is no JSON object: {error}.") from None
            continue
        key, equals, value = argument.partition("=")
        if not (key.isidentifier() and equals):
            raise UsageError(f"--args {argument} is neither a JSON object nor key=value.")
        parsed[key] = _value(value)
    return parsed


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _check_arguments(kind: type[nn.Module], given: dict[str, Any]) -> None:
    signature = inspect.signature(kind)
    by_name = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p.name for p in by_name if p.default is p.empty and p.name not in given]
    if missing:
        example = " ".join(f"{name}=..." for name in missing)
        raise UsageError(f"{kind.__name__} needs arguments: {', '.join(missing)}. Pass `--args {example}`.")
    takes_any = any(p.kind == p.VAR_KEYWORD for p in signature.parameters.values())
    unknown = [name for name in given if not takes_any and name not in {p.name for p in by_name}]
    if unknown:
        takes = ", ".join(p.name for p in by_name) or "none"
        raise UsageError(f"{kind.__name__} takes no argument {', '.join(unknown)}. It takes: {takes}.")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
