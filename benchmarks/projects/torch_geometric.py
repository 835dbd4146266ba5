"""PyG: a graph convolutional network that classifies random graphs."""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool


class GraphClassifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = torch.nn.ModuleList([GCNConv(8, 32), GCNConv(32, 32)])
        self.head = torch.nn.Linear(32, 2)

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        nodes = batch.x
        for convolution in self.convolutions:
            nodes = convolution(nodes, batch.edge_index).relu()
        scores = self.head(global_mean_pool(nodes, batch.batch))
        return torch.nn.functional.cross_entropy(scores, batch.y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(strategy: str) -> torch.nn.Module:
    graphs = [
        Data(x=torch.randn(10, 8), edge_index=torch.randint(0, 10, (2, 30)), y=torch.tensor([i % 2])) for i in range(64)
    ]
    model = GraphClassifier()
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy=strategy, logger=False)
    trainer.fit(model, DataLoader(graphs, batch_size=4, shuffle=True))
    return model
