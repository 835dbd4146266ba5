"""`BucketDDPStrategy` and the callbacks for `lightning.pytorch.Trainer`."""

from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
from lightning.pytorch.utilities.memory import is_oom_error

from lightning_bucketddp.bindings.callbacks import bound_class
from lightning_bucketddp.bindings.process_setup import TRAINER_PROCESS_SETUP, adopt_process_setup
from lightning_bucketddp.bindings.registration import strategy_class
from lightning_bucketddp.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_bucketddp.strategies.launchers import Launchers, ProcessLauncher, ScriptLauncher
from lightning_bucketddp.strategies.trainer import TrainerStrategy


def __getattr__(name: str) -> Any:
    return bound_class(name, "lightning.pytorch", __name__)


class BucketDDPCheckpointIO(AtomicCheckpointIO, TorchCheckpointIO):
    __doc__ = AtomicCheckpointIO.__doc__


class _ScriptLauncher(ScriptLauncher, _SubprocessScriptLauncher):
    pass


class _ProcessLauncher(ProcessLauncher, _MultiProcessingLauncher):
    on_exception_of = staticmethod(_interrupt)


@adopt_process_setup(DDPStrategy, TRAINER_PROCESS_SETUP)
class BucketDDPStrategy(TrainerStrategy, ParallelStrategy):
    __doc__ = TrainerStrategy.__doc__
    _torch_sync_batchnorm = TorchSyncBatchNorm
    _wrapping_checkpoint_io = _WrappingCheckpointIO
    _default_checkpoint_io = BucketDDPCheckpointIO
    _async_checkpoint_io = AsyncCheckpointIO
    _init_dist_connection = staticmethod(_init_dist_connection)
    _lightning_barrier = DDPStrategy.barrier
    _lightning_reduce = DDPStrategy.reduce
    _batch_size_of = staticmethod(extract_batch_size)
    _is_oom_error = staticmethod(is_oom_error)
    _launchers = Launchers(_ScriptLauncher, _ProcessLauncher, LightningEnvironment)
    _sigterm_exception = SIGTERMException
    _normal_ends = (_TunerExitException,)
    _callback = Callback
    _monitor_class = staticmethod(lambda: __getattr__("BucketDDPMonitor"))
    _class_for_root = staticmethod(strategy_class)
