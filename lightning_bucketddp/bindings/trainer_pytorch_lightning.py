"""`BucketDDPStrategy` and the callbacks for `pytorch_lightning.Trainer`."""

from typing import Any

from lightning_bucketddp.bindings.bind import bind_trainer, bound_class

BucketDDPStrategy: Any

globals().update(bind_trainer("pytorch_lightning", fabric="lightning_fabric", module=__name__))


def __getattr__(name: str) -> Any:
    return bound_class(name, "pytorch_lightning", __name__)
