"""The names under which Lightning finds our strategies."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

# Lightning's roots define separate classes and accept only their own, so each has a strategy class of its own.
_MODULE_OF = {
    "lightning.pytorch": "trainer_lightning",
    "pytorch_lightning": "trainer_pytorch_lightning",
    "lightning.fabric": "fabric_lightning",
    "lightning_fabric": "fabric_lightning_fabric",
}
_START_METHOD_OF = {
    "bucketddp": "popen",
    "bucketddp_spawn": "spawn",
    "bucketddp_fork": "fork",
    "bucketddp_notebook": "fork",
}


def binding_of(root: str) -> ModuleType:
    """Import what is bound to `root`."""
    return import_module(f"lightning_bucketddp.bindings.{_MODULE_OF[root]}")


def strategy_class(root: str) -> Any:
    """Return the `BucketDDPStrategy` that `root` accepts."""
    return binding_of(root).BucketDDPStrategy


def register(root: str) -> None:
    """Add our names to the strategy registry of `root`. Doing it again changes nothing."""

    # A function instead of the class: who imports Lightning and never asks for us pays nothing, and a strategy module
    # whose own imports bring in Lightning is not asked for its class before it has one.
    def create(**options: Any) -> Any:
        return strategy_class(root)(**options)

    if "lightning_bucketddp.strategies.trainer" in sys.modules:
        # Made before this root was imported: it accepts that class too.
        trainer = sys.modules["lightning_bucketddp.strategies.trainer"]
        trainer.accept_in_every_root(trainer.TrainerStrategy)
    strategies = import_module(f"{root}.strategies")
    registry = strategies.STRATEGY_REGISTRY if "fabric" in root else strategies.StrategyRegistry
    for name, start_method in _START_METHOD_OF.items():
        description = f"Data parallel with its own gradient bucketing; processes started by {start_method}"
        registry.register(name, create, description=description, override=True, start_method=start_method)
        for value in (False, True):
            registry.register(
                f"{name}_find_unused_parameters_{value}".lower(),
                create,
                description=f"{description}, find_unused_parameters={value}",
                override=True,
                start_method=start_method,
                find_unused_parameters=value,
            )
