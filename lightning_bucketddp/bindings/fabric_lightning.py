"""`BucketDDPStrategy` for `lightning.fabric.Fabric`."""

from typing import TYPE_CHECKING

from lightning_bucketddp.bindings.bind import bind_fabric

if TYPE_CHECKING:
    from lightning.fabric.strategies.parallel import ParallelStrategy

    from lightning_bucketddp.strategies.fabric import FabricStrategy

    class BucketDDPStrategy(FabricStrategy, ParallelStrategy): ...


globals().update(bind_fabric("lightning.fabric", module=__name__))
