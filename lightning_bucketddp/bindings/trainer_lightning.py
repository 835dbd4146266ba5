"""`BucketDDPStrategy` and the callbacks for `lightning.pytorch.Trainer`."""

from typing import TYPE_CHECKING, Any

from lightning_bucketddp.bindings.bind import bind_trainer, bound_class

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy

    from lightning_bucketddp.strategies.trainer import TrainerStrategy

    class BucketDDPStrategy(TrainerStrategy, ParallelStrategy): ...

    BatchSizeFinder: Any
    BucketDDPMonitor: Any
    ScaleLearningRate: Any
    ScalingMonitor: Any
    Tuner: Any


globals().update(bind_trainer("lightning.pytorch", fabric="lightning.fabric", module=__name__))


def __getattr__(name: str) -> Any:
    return bound_class(name, "lightning.pytorch", __name__)
