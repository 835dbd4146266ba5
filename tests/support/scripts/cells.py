"""The cells of a notebook. What is defined in them is in no module that another process could import."""

# %%
import os
from typing import Any

import lightning as L  # noqa: N812
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


# %%
class Regression(L.LightningModule):
    pids: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.register_buffer("pids", torch.zeros(2, dtype=torch.int64))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def on_train_end(self) -> None:
        gathered: Any = self.all_gather(torch.tensor(os.getpid()))
        self.pids.copy_(gathered)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        inputs = torch.linspace(-1, 1, 64).view(16, 4)
        return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=2)


# %%
def make_trainer(strategy: str) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, **quiet)


# %%
def make_fabric(strategy: str) -> L.Fabric:
    return L.Fabric(accelerator="cpu", devices=2, strategy=strategy)


def train(fabric: L.Fabric) -> list[Any]:
    """Each rank with a sample of its own; the weights at the end."""
    torch.manual_seed(0)
    module, optimizer = fabric.setup(layer := nn.Linear(4, 1), torch.optim.AdamW(layer.parameters(), lr=0.1))
    for step in range(8):
        optimizer.zero_grad()
        fabric.backward(module(torch.full((1, 4), 1.0 + step + fabric.global_rank)).square().mean())
        optimizer.step()
    return [value.tolist() for value in layer.state_dict().values()]
