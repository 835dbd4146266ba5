"""scvi-tools: a variational autoencoder of gene expression, on synthetic counts."""

from __future__ import annotations

import scvi
import torch
from scvi.data import synthetic_iid
from scvi.model import SCVI


def train(strategy: str) -> torch.nn.Module:
    scvi.settings.seed = 1  # else the package shuffles by a seed of its own
    cells = synthetic_iid()
    SCVI.setup_anndata(cells, batch_key="batch")
    model = SCVI(cells, n_hidden=32, n_latent=5)
    model.train(max_epochs=3, train_size=1.0, batch_size=32, accelerator="cpu", devices=2, strategy=strategy)
    return model.module
