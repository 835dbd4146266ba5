"""`BucketDDPStrategy` for `lightning_fabric.Fabric`."""

from typing import Any

from lightning_bucketddp.bindings.bind import bind_fabric

BucketDDPStrategy: Any

globals().update(bind_fabric("lightning_fabric", module=__name__))
