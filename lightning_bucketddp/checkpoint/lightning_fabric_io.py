"""The checkpoint I/O for `pytorch_lightning` and `lightning_fabric`."""

from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_bucketddp.checkpoint.atomic_io import AtomicCheckpointIO


class BucketDDPCheckpointIO(AtomicCheckpointIO, TorchCheckpointIO):
    """The default of the bucketddp strategies: what `TorchCheckpointIO` writes, written atomically."""
