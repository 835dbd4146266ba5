"""The environment of processes that a launcher of `lightning_fabric` launches."""

from lightning_fabric.plugins.environments.lightning import LightningEnvironment

from lightning_bucketddp.strategies.local_environment import HoldsPort


class LocalEnvironment(HoldsPort, LightningEnvironment):
    __doc__ = HoldsPort.__doc__
