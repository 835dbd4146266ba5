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
    """Return the module of `bindings` for `root`."""
    return import_module(f"lightning_bucketddp.bindings.{_MODULE_OF[root]}")


def strategy_class(root: str) -> Any:
    """Return the `BucketDDPStrategy` that `root` accepts."""
    return binding_of(root).BucketDDPStrategy


def accept_in_every_root(strategy: type) -> None:
    """Have the Trainers and Fabrics of all imported roots accept instances of `strategy`, made for a Trainer.

    Import sorters put `from lightning_bucketddp import BucketDDPStrategy` before `import pytorch_lightning`, when the
    root is not known yet. The strategy becomes one of the right class when a Trainer or Fabric gets it (`follow_root`).
    """
    for root in _MODULE_OF:
        if hasattr(strategies := sys.modules.get(f"{root}.strategies"), "Strategy"):
            strategies.Strategy.register(strategy)  # type: ignore[union-attr]


def follow_root(strategy: Any, accelerator: object) -> None:
    """Change the class of `strategy` to that for the root of Lightning that `accelerator` is from."""
    modules = [base.__module__ for base in type(accelerator).__mro__]
    # Accelerators of a Trainer derive from those of Fabric, so the roots of Fabric come last.
    root = next((root for root in _MODULE_OF if any(module.startswith(f"{root}.") for module in modules)), None)
    if root is None or isinstance(strategy, wanted := strategy_class(root)):
        return
    if not type(strategy).__module__.startswith("lightning_bucketddp."):
        raise TypeError(
            f"`{type(strategy).__name__}` derives from a `BucketDDPStrategy` for another root of Lightning than"
            f" `{root}`, where the {'Fabric' if 'fabric' in root else 'Trainer'} is from. Derive it from"
            f" `{wanted.__module__}.BucketDDPStrategy`."
        )
    strategy.__class__ = wanted
    if "fabric" in root:  # instances for different Trainers have the same attributes
        strategy.make_again()


def register(root: str) -> None:
    """Add our names to the strategy registry of `root`. Doing it again changes nothing."""

    # A function instead of the class, which is imported on demand: a strategy module may itself import Lightning.
    def create(**options: Any) -> Any:
        return strategy_class(root)(**options)

    if (trainer := sys.modules.get("lightning_bucketddp.strategies.trainer")) is not None:
        accept_in_every_root(trainer.TrainerStrategy)  # which was imported before this root
    if f"{root}.cli" in sys.modules:
        binding_of(root)  # so that a config may have `class_path: BucketDDPStrategy`
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
