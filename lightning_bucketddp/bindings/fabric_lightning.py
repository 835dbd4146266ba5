"""`BucketDDPStrategy` for `lightning.fabric.Fabric`."""

from functools import wraps
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.utilities.distributed import _init_dist_connection

from lightning_bucketddp.bindings.process_setup import FABRIC_PROCESS_SETUP, adopt_process_setup
from lightning_bucketddp.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_bucketddp.strategies.fabric import FabricStrategy
from lightning_bucketddp.strategies.launchers import Launchers, ProcessLauncher, ScriptLauncher


class BucketDDPCheckpointIO(AtomicCheckpointIO, TorchCheckpointIO):
    __doc__ = AtomicCheckpointIO.__doc__


class _ScriptLauncher(ScriptLauncher, _SubprocessScriptLauncher):
    pass


class _ProcessLauncher(ProcessLauncher, _MultiProcessingLauncher):  # type: ignore[misc]
    pass


@adopt_process_setup(DDPStrategy, FABRIC_PROCESS_SETUP)
class BucketDDPStrategy(FabricStrategy, ParallelStrategy):
    __doc__ = FabricStrategy.__doc__
    _default_checkpoint_io = BucketDDPCheckpointIO
    _launchers = Launchers(_ScriptLauncher, _ProcessLauncher, LightningEnvironment)
    _init_dist_connection = staticmethod(_init_dist_connection)

    # Fabric forbids a plain `loss.backward()` for a strategy that overrides `backward`. Ours works without, and says
    # so by wrapping the original.
    @wraps(ParallelStrategy.backward)
    def backward(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        FabricStrategy.backward(self, *args, **kwargs)
