"""`BucketDDPStrategy` for `pytorch_lightning.Trainer`."""

from lightning_fabric.plugins.environments.lightning import LightningEnvironment
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

from lightning_bucketddp.checkpoint.lightning_fabric_io import BucketDDPCheckpointIO
from lightning_bucketddp.strategies.binding import TRAINER_PROCESS_SETUP, adopt_process_setup
from lightning_bucketddp.strategies.launching import Launchers, ProcessLauncher, ScriptLauncher
from lightning_bucketddp.strategies.trainer import TrainerStrategy


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
    _batch_size_of = staticmethod(extract_batch_size)
    _launchers = Launchers(_ScriptLauncher, _ProcessLauncher, LightningEnvironment)
    _sigterm_exception = SIGTERMException
    _normal_ends = (_TunerExitException,)
    _callback = Callback
    _callbacks_module = "lightning_bucketddp.callbacks.pytorch_lightning_callbacks"
