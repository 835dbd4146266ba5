"""The checkpoint I/O for `lightning.pytorch` and `lightning.fabric`."""

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_bucketddp.checkpoint.atomic_io import AtomicCheckpointIO


class BucketDDPCheckpointIO(AtomicCheckpointIO, TorchCheckpointIO):
    """The default of the bucketddp strategies: what `TorchCheckpointIO` writes, written atomically."""
