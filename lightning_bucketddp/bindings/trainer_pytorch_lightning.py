"""`BucketDDPStrategy` and the callbacks for `pytorch_lightning.Trainer`."""

from typing import TYPE_CHECKING, Any

from lightning_bucketddp.bindings.bind import bind_trainer, bound_class

if TYPE_CHECKING:
    from pytorch_lightning.strategies import ParallelStrategy

    from lightning_bucketddp.strategies.trainer import TrainerStrategy

    class BucketDDPStrategy(TrainerStrategy, ParallelStrategy): ...


globals().update(bind_trainer("pytorch_lightning", fabric="lightning_fabric", module=__name__))


def __getattr__(name: str) -> Any:
    return bound_class(name, "pytorch_lightning", __name__)
