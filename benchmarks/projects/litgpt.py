"""LitGPT: a small GPT, trained with Fabric."""

from __future__ import annotations

import lightning
import torch
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy
from torch.utils.data import DataLoader


def train(strategy: str) -> torch.nn.Module:
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = GPT(Config(block_size=32, vocab_size=128, n_layer=2, n_head=4, n_embd=32))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(DataLoader(torch.randint(0, 128, (64, 33)), batch_size=4, shuffle=True))
    for tokens in loader:
        loss = chunked_cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model
