"""The public import path of what `bindings/trainer_lightning.py` defines."""

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy

__all__ = ["BucketDDPStrategy"]
