"""The model that docs/command-line.md plans for, but with fewer words and layers."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from torch import nn


class LitGPT(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(width, nhead=12, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(width, 1000, bias=False)
