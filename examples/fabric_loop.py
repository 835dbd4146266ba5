"""A training loop of your own with Fabric: accumulation without communication, a metric of all ranks, a checkpoint.

python examples/fabric_loop.py
"""

import argparse
from pathlib import Path

import torch
from lightning import Fabric, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split


def loaders() -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(start_dim=1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    training, validation = random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return DataLoader(training, batch_size=16, shuffle=True), DataLoader(validation, batch_size=64)


@torch.no_grad()
def accuracy(fabric: Fabric, model: nn.Module, validation: DataLoader) -> float:
    """Return the accuracy over all ranks."""
    model.eval()
    answers = torch.cat([model(images).argmax(dim=1) == labels for images, labels in validation])
    model.train()
    return fabric.all_reduce(answers.float().mean(), reduce_op="mean").item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-epochs", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2, help="batches in a step")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--checkpoint", type=Path, help="where to save; continued from, if it is there")
    arguments = parser.parse_args()

    fabric = Fabric(accelerator="cpu", devices=arguments.devices, strategy="bucketddp")
    fabric.launch()
    seed_everything(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    training, validation = fabric.setup_dataloaders(*loaders())

    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if arguments.checkpoint and arguments.checkpoint.exists():
        fabric.load(arguments.checkpoint, state)

    while state["epoch"] < arguments.max_epochs:
        for index, (images, labels) in enumerate(training, start=1):
            is_last = index % arguments.accumulate == 0 or index == len(training)
            # Gradients are sent only for the last batch of a step.
            with fabric.no_backward_sync(model, enabled=not is_last):
                fabric.backward(cross_entropy(model(images), labels) / arguments.accumulate)
            if is_last:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        state["epoch"] += 1
        fabric.print(f"epoch {state['epoch']}: validation accuracy: {accuracy(fabric, model, validation):.1%}")
        if arguments.checkpoint:
            fabric.save(arguments.checkpoint, state)


if __name__ == "__main__":
    main()
