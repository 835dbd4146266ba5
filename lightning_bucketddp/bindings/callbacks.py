"""The callbacks, for whichever root of Lightning they are used with.

Made when they are asked for: every start of a run without them would have to wait for what they import.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

# By public name: where the class is, less its Lightning base class.
_CALLBACKS = {
    "BucketDDPMonitor": ("monitor", "StepMonitoring"),
    "ScaleLearningRate": ("scale_learning_rate", "LearningRateScaling"),
    "ScalingMonitor": ("scaling_monitor", "ScalingMeasurement"),
}


@functools.cache
def bound_callback(name: str, base: type, module: str) -> Any:
    """Return the callback `name` as a subclass of Lightning's `base`, for the binding `module`, which asks."""
    if name not in _CALLBACKS:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    file, part_name = _CALLBACKS[name]
    part = getattr(import_module(f"lightning_bucketddp.callbacks.{file}"), part_name)
    return type(name, (part, base), {"__doc__": part.__doc__, "__module__": module})
