"""A LightningModule that makes its layers late. Ranks import no Lightning for the sake of the other modules."""

from __future__ import annotations

import lightning.pytorch as pl
from torch import nn


class Configured(pl.LightningModule):
    """Has its parameters from `configure_model`."""

    def configure_model(self) -> None:
        self.layer = nn.Linear(3, 4)
