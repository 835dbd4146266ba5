"""chemprop: a message passing network that predicts a property of molecules."""

from __future__ import annotations

import lightning
import numpy as np
import torch
from chemprop import data, models, nn

SMILES = ["CCO", "c1ccccc1", "CC(=O)O", "CCN(CC)CC", "C1CCCCC1O", "CC(C)Cl", "OCC(O)CO", "c1ccncc1"]


def train(strategy: str) -> torch.nn.Module:
    targets = np.random.randn(64, 1)
    molecules = [data.MoleculeDatapoint.from_smi(SMILES[i % 8], target) for i, target in enumerate(targets)]
    loader = data.build_dataloader(data.MoleculeDataset(molecules), batch_size=4, num_workers=0)
    model = models.MPNN(nn.BondMessagePassing(), nn.MeanAggregation(), nn.RegressionFFN(), batch_norm=True)
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy=strategy, logger=False)
    trainer.fit(model, loader)
    return model
