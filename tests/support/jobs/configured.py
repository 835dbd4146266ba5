"""LightningModules to be planned. Ranks import no Lightning for the sake of the other modules."""

from __future__ import annotations

import lightning.pytorch as pl
from torch import nn


class Configured(pl.LightningModule):
    """Has its parameters from `configure_model`."""

    def configure_model(self) -> None:
        self.layer = nn.Linear(3, 4)


class Assembled(pl.LightningModule):
    """Gets a part of it from outside, as configs can say."""

    def __init__(self, head: nn.Module, width: int = 3, **options: bool) -> None:
        super().__init__()
        self.body = nn.Linear(width, width, **options)
        self.head = head

    @classmethod
    def small(cls) -> Assembled:
        """A factory that is no function."""
        return cls(nn.Linear(1, 1), width=1)
