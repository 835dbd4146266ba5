"""`BucketDDPStrategy` and the callbacks for `pytorch_lightning.Trainer`."""

from typing import Any

from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning_fabric.utilities.distributed import _init_dist_connection
from pytorch_lightning import Callback
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO
from pytorch_lightning.plugins.layer_sync import TorchSyncBatchNorm
from pytorch_lightning.strategies import DDPStrategy, ParallelStrategy
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from pytorch_lightning.trainer.call import _interrupt
from pytorch_lightning.utilities.data import extract_batch_size
from pytorch_lightning.utilities.exceptions import SIGTERMException, _TunerExitException
from pytorch_lightning.utilities.memory import is_oom_error

from lightning_bucketddp.bindings.callbacks import bound_class
from lightning_bucketddp.bindings.process_setup import TRAINER_PROCESS_SETUP, adopt_process_setup
from lightning_bucketddp.bindings.registration import strategy_class
from lightning_bucketddp.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_bucketddp.strategies.launchers import Launchers, ProcessLauncher, ScriptLauncher
from lightning_bucketddp.strategies.trainer import TrainerStrategy


def __getattr__(name: str) -> Any:
    return bound_class(name, "pytorch_lightning", __name__)


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
