"""Lets Lightning find `strategy="bucketddp"` without an import.

torch calls `autoload` while it is being imported (entry point group `torch.backends`), and cannot be imported if that
fails. So this file stands beside the package, needs only the standard library, and its errors become warnings.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

# Not the roots themselves: they import torch, so they are half imported when torch calls us. Each of these modules
# comes after torch and holds the strategy registry of its root.
_ROOT_OF = {
    f"{root}.strategies": root
    for root in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")
}
# jsonargparse finds a class by its short name if it is imported.
_ROOT_OF |= {f"{root}.cli": root for root in ("lightning.pytorch", "pytorch_lightning")}


def autoload() -> None:
    """The entry point: register with Lightning when it is imported, unless `BUCKETDDP_AUTOLOAD=0`."""
    if os.environ.get("BUCKETDDP_AUTOLOAD") != "0":
        register_when_imported()


def register_when_imported() -> None:
    """Register with each root of Lightning: now if it is imported, otherwise as soon as it is."""
    if not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder())
    for module, root in _ROOT_OF.items():
        if module in sys.modules:
            _register(root)


class _RegistryFinder(MetaPathFinder):
    """Finds the modules that hold a strategy registry or the CLI, as Python would, and has us registered in them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _ROOT_OF:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader, root=_ROOT_OF[fullname])
        return spec


class _RegisteringLoader(Loader):
    """Loads a module with its own loader, then registers."""

    def __init__(self, loader: Loader, *, root: str) -> None:
        self._loader = loader
        self._root = root

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader: `inspect`, `importlib.resources` and `reload` see nothing of us.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register(self._root)


def _register(root: str) -> None:
    try:
        import_module("lightning_bucketddp.bindings.registration").register(root)
    except Exception as error:
        warnings.warn(
            f'`{root}` will not know strategy="bucketddp": registering it raised {type(error).__name__}: {error}.'
            " Reinstall lightning-bucketddp, or set BUCKETDDP_AUTOLOAD=0 to leave it out.",
            RuntimeWarning,
            stacklevel=2,
        )
