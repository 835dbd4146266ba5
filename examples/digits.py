"""Learns handwritten digits: images, SyncBatchNorm, accumulation, and a validation that all ranks share.

python examples/digits.py
"""

import argparse

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_bucketddp import BucketDDPStrategy


class DigitClassifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 10),
        )

    def training_step(self, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.layers(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        images, labels = batch
        accuracy = (self.layers(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def loaders() -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    training, validation = random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return DataLoader(training, batch_size=16, shuffle=True), DataLoader(validation, batch_size=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-epochs", type=int, default=5)
    parser.add_argument("--devices", type=int, default=2, help="processes on each node")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--auto-resume", action="store_true", help="save, and continue from there when started again")
    arguments = parser.parse_args()

    seed_everything(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        num_nodes=arguments.num_nodes,
        strategy=BucketDDPStrategy(auto_resume=arguments.auto_resume),
        sync_batchnorm=True,
        accumulate_grad_batches=2,
        max_epochs=arguments.max_epochs,
        logger=False,
        callbacks=[ModelCheckpoint(every_n_train_steps=10)] if arguments.auto_resume else [],
        enable_checkpointing=arguments.auto_resume,
    )
    trainer.fit(DigitClassifier(), *loaders())

    # A resumed run that was already complete has no metrics.
    if trainer.is_global_zero and "accuracy" in trainer.callback_metrics:
        print(f"validation accuracy: {trainer.callback_metrics['accuracy']:.1%}")


if __name__ == "__main__":
    main()
