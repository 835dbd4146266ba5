"""The callbacks and the tuner, for whichever root of Lightning they are used with.

Made when they are asked for: every start of a run without them would have to wait for what they import.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

# By public name: where the class is, less its Lightning base class, and where that one is.
_CLASSES = {
    "BatchSizeFinder": ("batch_size_finder", "SharedBatchSizeFinder", "callbacks", "BatchSizeFinder"),
    "BucketDDPMonitor": ("monitor", "StepMonitoring", "callbacks", "Callback"),
    "ScaleLearningRate": ("scale_learning_rate", "LearningRateScaling", "callbacks", "Callback"),
    "ScalingMonitor": ("scaling_monitor", "ScalingMeasurement", "callbacks", "Callback"),
    "Tuner": ("batch_size_finder", "SharedTuner", "tuner", "Tuner"),
}


@functools.cache
def bound_class(name: str, root: str, module: str) -> Any:
    """Return the class `name` as a subclass of one of Lightning's `root`, for the binding `module`, which asks."""
    if name not in _CLASSES:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    file, part_name, base_module, base_name = _CLASSES[name]
    part = getattr(import_module(f"lightning_bucketddp.callbacks.{file}"), part_name)
    base = getattr(import_module(f"{root}.{base_module}"), base_name)
    members = {"__doc__": part.__doc__, "__module__": module, "_binding": module, "lightning_base": base}
    return type(name, (part, base), members)
