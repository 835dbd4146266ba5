"""Layers that are synchronised between ranks while a model is fitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.replicas.sync_batchnorm import convert_sync_batchnorm, revert_sync_batchnorm, set_idle

if TYPE_CHECKING:
    from lightning.pytorch.plugins.layer_sync import LayerSync


class SyncedLayers:
    """What `Trainer(sync_batchnorm=True)` or a `LayerSync` plugin of the user does to a model.

    Args:
        plugin: what the Trainer gave the strategy.
        ours: the plugin class that stands for `sync_batchnorm=True`; ours works on CPU too.
        collectives: how to reach the other ranks.
    """

    def __init__(self, plugin: LayerSync, *, ours: type, collectives: Collectives) -> None:
        self._plugin = plugin
        self._collectives = collectives
        self._is_ours = type(plugin) is ours
        self._is_idle = False

    def apply(self, model: nn.Module) -> nn.Module:
        """Synchronise the layers."""
        if not self._is_ours:
            return self._plugin.apply(model)
        convert_sync_batchnorm(model, self._collectives)
        return model

    def set_idle(self, model: nn.Module, is_idle: bool) -> None:
        """Whether this rank's batches count."""
        if self._is_ours and is_idle != self._is_idle:
            set_idle(model, is_idle)
            self._is_idle = is_idle

    def revert(self, model: nn.Module) -> nn.Module:
        """Undo `apply`."""
        if not self._is_ours:
            return self._plugin.revert(model)
        revert_sync_batchnorm(model)
        return model
