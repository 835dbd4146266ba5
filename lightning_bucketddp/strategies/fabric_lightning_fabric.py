"""The public import path of what `bindings/fabric_lightning_fabric.py` defines."""

from lightning_bucketddp.bindings.fabric_lightning_fabric import BucketDDPStrategy

__all__ = ["BucketDDPStrategy"]
