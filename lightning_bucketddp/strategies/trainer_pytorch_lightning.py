"""`BucketDDPStrategy` for `pytorch_lightning.Trainer`."""

from lightning_fabric.utilities.distributed import _init_dist_connection
from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO
from pytorch_lightning.plugins.layer_sync import TorchSyncBatchNorm
from pytorch_lightning.strategies import DDPStrategy, ParallelStrategy
from pytorch_lightning.utilities.data import extract_batch_size

from lightning_bucketddp.checkpoint.lightning_fabric_io import BucketDDPCheckpointIO
from lightning_bucketddp.strategies.binding import TRAINER_PROCESS_SETUP, adopt_process_setup
from lightning_bucketddp.strategies.lightning_fabric_environment import LocalEnvironment
from lightning_bucketddp.strategies.trainer import TrainerStrategy


@adopt_process_setup(DDPStrategy, TRAINER_PROCESS_SETUP)
class BucketDDPStrategy(TrainerStrategy, ParallelStrategy):
    __doc__ = TrainerStrategy.__doc__
    _torch_sync_batchnorm = TorchSyncBatchNorm
    _wrapping_checkpoint_io = _WrappingCheckpointIO
    _default_checkpoint_io = BucketDDPCheckpointIO
    _local_environment = LocalEnvironment
    _init_dist_connection = staticmethod(_init_dist_connection)
    _batch_size_of = staticmethod(extract_batch_size)
