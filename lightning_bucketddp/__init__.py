"""Data-parallel training for Lightning with its own gradient bucketing."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_bucketddp.bindings.registration import binding_of
from lightning_bucketddp_autoload import register_when_imported

if TYPE_CHECKING:
    from lightning_bucketddp.bindings.trainer_lightning import (
        BatchSizeFinder,
        BucketDDPMonitor,
        BucketDDPStrategy,
        ScaleLearningRate,
        ScalingMonitor,
        Tuner,
    )
    from lightning_bucketddp.checkpoint.checkpoint_io import (
        CheckpointReadError,
        CheckpointWriteError,
        UnsafeCheckpointError,
    )
    from lightning_bucketddp.comm.step_exchange import OutOfStepError
    from lightning_bucketddp.config import LocalSteps, MaxRestarts, ReplicaChecks, Timeouts
    from lightning_bucketddp.faults.failure import RankFailedError
    from lightning_bucketddp.reducer.bucket import LateGradientError
    from lightning_bucketddp.reducer.nonfinite import NonFiniteError
    from lightning_bucketddp.replicas.consistency import ReplicaDivergedError
    from lightning_bucketddp.replicas.replicas import ReplicaMismatchError
    from lightning_bucketddp.sharding.gradient import ShardedGradientError
    from lightning_bucketddp.startup.store import StartError

__version__ = "0.2.0"
__all__ = [
    "BatchSizeFinder",
    "BucketDDPMonitor",
    "BucketDDPStrategy",
    "CheckpointReadError",
    "CheckpointWriteError",
    "LateGradientError",
    "LocalSteps",
    "MaxRestarts",
    "NonFiniteError",
    "OutOfStepError",
    "RankFailedError",
    "ReplicaChecks",
    "ReplicaDivergedError",
    "ReplicaMismatchError",
    "ScaleLearningRate",
    "ScalingMonitor",
    "ShardedGradientError",
    "StartError",
    "Timeouts",
    "Tuner",
    "UnsafeCheckpointError",
    "__version__",
]

# Imported on demand: `import lightning_bucketddp` imports neither torch nor Lightning.
_NAMES_IN = {
    "checkpoint.checkpoint_io": ("CheckpointReadError", "CheckpointWriteError", "UnsafeCheckpointError"),
    "comm.step_exchange": ("OutOfStepError",),
    "config": ("LocalSteps", "MaxRestarts", "ReplicaChecks", "Timeouts"),
    "faults.failure": ("RankFailedError",),
    "reducer.bucket": ("LateGradientError",),
    "reducer.nonfinite": ("NonFiniteError",),
    "replicas.consistency": ("ReplicaDivergedError",),
    "replicas.replicas": ("ReplicaMismatchError",),
    "sharding.gradient": ("ShardedGradientError",),
    "startup.store": ("StartError",),
}

register_when_imported()


def __getattr__(name: str) -> Any:
    for module, names in _NAMES_IN.items():
        if name in names:
            return getattr(import_module(f"lightning_bucketddp.{module}"), name)
    if name in __all__:
        return getattr(binding_of(_trainer_root()), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _trainer_root() -> str:
    """Return the root of Lightning to bind to: one that is imported, otherwise one that is installed."""
    roots = ("lightning.pytorch", "pytorch_lightning")
    installed = [root for root in roots if find_spec(root.partition(".")[0]) is not None]
    imported = [root for root in installed if root in sys.modules]
    if not installed:
        raise ImportError(
            "BucketDDPStrategy needs Lightning, but neither `lightning` nor `pytorch_lightning` is installed."
            " Run `pip install lightning`."
        )
    return (imported or installed)[0]
