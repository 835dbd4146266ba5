"""The public import path of what `bindings/fabric_lightning.py` defines."""

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy

__all__ = ["BucketDDPStrategy"]
