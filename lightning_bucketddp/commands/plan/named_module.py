"""Make the module that a command line names by its class, by a function, or by the config of a LightningCLI."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_bucketddp.commands import UsageError, first_line

_CONFIG_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class NamedModule:
    """The name of a module, and a function that builds it."""

    name: str
    build: Callable[[], Any]

    @classmethod
    def find(cls, name: str, arguments: Sequence[str], *, config: Path | None = None) -> NamedModule:
        """Find a class or function `MODULE:NAME`, or the model of a LightningCLI config if `name` is its path.

        `arguments` are JSON objects or `key=value`; they override those of the config.
        """
        given = _parse(arguments)
        if name.endswith(_CONFIG_SUFFIXES):
            config = Path(name)
            maker, values = _class_of(config)
        elif config is not None:
            maker, values = _find(name), _model_of(config)
        else:
            maker = _find(name)
            _check_arguments(maker, given)
            return cls(_name_of(maker), lambda: maker(**given))
        return cls(_name_of(maker), _with_config(maker, values, given, config=config))

    def without_memory(self) -> nn.Module:
        """Build the module on the meta device, without memory, or on the CPU if that fails."""
        try:
            return self._make("meta")
        except Exception:  # a constructor may need real tensors
            return self.make()

    def make(self) -> nn.Module:
        """Build the module on the CPU."""
        try:
            return self._make("cpu")
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"{self.name} cannot be made: {first_line(error)}") from error

    def _make(self, device: str) -> nn.Module:
        with torch.device(device):
            module = self.build()
            if not isinstance(module, nn.Module):
                raise UsageError(f"{self.name} makes no torch.nn.Module, but {module!r:.80}.")
            configure = getattr(module, "configure_model", None)  # a LightningModule's
            if callable(configure):
                configure()
        return module


def _find(name: str) -> Callable[..., Any]:
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(
            f"{name!r} names no class. Write MODULE:CLASS, for example my_project.models:LitNet, or the path of a"
            " LightningCLI config that ends with .yaml."
        )
    module = _import(module_name)
    try:
        found = attrgetter(attribute)(module)
    except AttributeError:
        classes = [n for n, v in vars(module).items() if _is_module_class(v) and v.__module__ == module_name]
        raise UsageError(f"{module_name} has no {attribute!r}. It has {', '.join(classes) or 'no modules'}.") from None
    if isinstance(found, type) and not _is_module_class(found):
        raise UsageError(f"{name} is no LightningModule and no torch.nn.Module, but {found!r:.80}.")
    if isinstance(found, nn.Module) or not callable(found):
        raise UsageError(f"{name} is neither a class of modules nor a function that makes one, but {found!r:.80}.")
    maker: Callable[..., Any] = found
    return maker


def _import(module_name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise UsageError(
                f"There is no module {missing!r}. Run the command in the folder of your project, or set PYTHONPATH."
            ) from error
        raise UsageError(f"Importing {module_name} failed: {first_line(error)}") from error


def _is_module_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _name_of(maker: Callable[..., Any]) -> str:
    return getattr(maker, "__name__", type(maker).__name__)


# --- LightningCLI configs


def _class_of(config: Path) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the class that the config names, and its part of the config."""
    model = _model_of(config)
    path = model.get("class_path")
    instead = f"`bucketddp plan MODULE:CLASS --config {config}`"
    if not isinstance(path, str):
        raise UsageError(
            f"{config} has no `model.class_path`, as that of a LightningCLI which has one model class. Name the class,"
            f" too: {instead}."
        )
    module_name, _, name = path.rpartition(".")
    if not module_name or module_name == "__main__":
        raise UsageError(
            f"{config} names the class {path!r}, which only the script that wrote it can find. Name it as it can be"
            f" imported: {instead}."
        )
    return _find(f"{module_name}:{name}"), model


def _model_of(config: Path) -> dict[str, Any]:
    """Return the part of the config about the model, of the subcommand `fit` or of all."""
    import yaml  # type: ignore[import-untyped]  # a requirement of Lightning

    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{config} cannot be read: {error.strerror}.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{config} is no YAML: {' '.join(str(error).split())}.") from error
    if isinstance(content, dict) and "model" not in content and isinstance(content.get("fit"), dict):
        content = content["fit"]
    model = content.get("model", {}) if isinstance(content, dict) else None
    if not isinstance(model, dict):
        raise UsageError(f"{config} is no config of a LightningCLI: it says nothing of a `model`.")
    return model


def _with_config(
    maker: Callable[..., Any], model: dict[str, Any], given: dict[str, Any], *, config: Path
) -> Callable[[], Any]:
    """Return a function that builds the module as a LightningCLI does, with arguments parsed by their types."""
    try:
        from jsonargparse import ArgumentParser
    except ImportError as error:
        raise UsageError(
            "Reading a LightningCLI config needs jsonargparse: `pip install 'jsonargparse[signatures]'`."
        ) from error
    values = model.get("init_args") or {} if "class_path" in model else model
    further = model.get("dict_kwargs") or {} if "class_path" in model else {}
    parser = ArgumentParser(exit_on_error=False)
    try:
        if isinstance(maker, type):
            parser.add_class_arguments(maker, "model", fail_untyped=False, sub_configs=True, instantiate=False)
        else:
            parser.add_function_arguments(maker, "model", fail_untyped=False, sub_configs=True)
        parsed = parser.parse_object({"model": {**values, **given}})
    except Exception as error:  # of many types; all are about the content of the config
        raise UsageError(f"{config} does not fit {_name_of(maker)}: {' '.join(str(error).split())}.") from error
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # before jsonargparse 4.49
    return lambda: maker(**{**instantiate(parsed).get("model", {}), **further})


# --- Arguments of a command line


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
        parsed[key] = value
        with suppress(ValueError):  # a plain string
            parsed[key] = json.loads(value)
    return parsed


def _check_arguments(maker: Callable[..., Any], given: dict[str, Any]) -> None:
    """Raise if required arguments are missing, or if `maker` does not take one."""
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):  # written in C, say
        return
    by_name = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p.name for p in by_name if p.default is p.empty and p.name not in given]
    if missing:
        example = " ".join(f"{name}=..." for name in missing)
        raise UsageError(f"{_name_of(maker)} needs arguments: {', '.join(missing)}. Pass `--args {example}`.")
    takes_any = any(p.kind == p.VAR_KEYWORD for p in signature.parameters.values())
    unknown = [name for name in given if not takes_any and name not in {p.name for p in by_name}]
    if unknown:
        takes = ", ".join(p.name for p in by_name) or "none"
        raise UsageError(f"{_name_of(maker)} takes no argument {', '.join(unknown)}. It takes: {takes}.")
