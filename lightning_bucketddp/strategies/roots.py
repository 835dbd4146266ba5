"""Which root of Lightning a strategy is used with. Each defines classes of its own and accepts only those."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lightning_bucketddp.strategies.options import option_defaults

TRAINER_ROOTS = ("lightning.pytorch", "pytorch_lightning")
FABRIC_ROOTS = ("lightning.fabric", "lightning_fabric")


def accept_in_every_root(strategy: type) -> None:
    """Have the Trainers and Fabrics of all roots that are imported take instances of `strategy`, made for a Trainer.

    Import sorters put `from lightning_bucketddp import BucketDDPStrategy` before `import pytorch_lightning`, when it
    cannot be known yet who will get it. It turns into the right class when somebody does.
    """
    for root in (*TRAINER_ROOTS, *FABRIC_ROOTS):
        if hasattr(strategies := sys.modules.get(f"{root}.strategies"), "Strategy"):
            strategies.Strategy.register(strategy)  # type: ignore[union-attr]


def follow_root(strategy: Any, accelerator: object, class_for_root: Callable[[str], type]) -> None:
    """Turn `strategy` into the class for the root of Lightning that `accelerator` is from, if it is for another."""
    modules = [base.__module__ for base in type(accelerator).__mro__]
    # Accelerators of a Trainer derive from those of Fabric.
    roots = (*TRAINER_ROOTS, *FABRIC_ROOTS)
    root = next((root for root in roots if any(module.startswith(f"{root}.") for module in modules)), None)
    if root is None or isinstance(strategy, wanted := class_for_root(root)):
        return
    if not type(strategy).__module__.startswith("lightning_bucketddp."):
        raise TypeError(
            f"`{type(strategy).__name__}` derives from a `BucketDDPStrategy` for another root of Lightning than"
            f" `{root}`, where the {'Trainer' if root in TRAINER_ROOTS else 'Fabric'} is from. Derive it from"
            f" `{wanted.__module__}.BucketDDPStrategy`."
        )
    strategy.__class__ = wanted
    if root in FABRIC_ROOTS:  # instances for different Trainers have the same attributes
        _make_again(strategy)


def _make_again(strategy: Any) -> None:
    """Initialise `strategy`, which was made for a Trainer, as what it is now."""
    options = {**strategy.given_options, "start_method": strategy._start_method}
    for name in options.keys() - option_defaults(type(strategy).__init__).keys():
        raise TypeError(
            f"`{name}` is an option of `BucketDDPStrategy` for the Trainer, and is not available with Fabric."
            f" Leave it out, or see `{type(strategy).__module__}.BucketDDPStrategy` for what there is."
        )
    vars(strategy).clear()
    strategy.__init__(**options)
    strategy.given_options = options
