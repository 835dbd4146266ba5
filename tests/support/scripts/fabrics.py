"""A Fabric for jobs that run on ranks."""

from __future__ import annotations

import importlib
from typing import Any

from lightning_bucketddp.bindings.registration import strategy_class
from tests.support.scripts.trainers import devices

ROOTS = ["lightning.fabric", "lightning_fabric"]


def make_fabric(strategy: Any, *, root: str = ROOTS[0], **options: Any) -> Any:
    fabric_class = importlib.import_module(root).Fabric
    fabric = fabric_class(**devices(), strategy=strategy, **options)
    fabric.launch()
    return fabric


def strategy_of(root: str, **options: Any) -> Any:
    return strategy_class(root)(**options)
