"""Tests on several processes as on one: every image counts once, and the predictions of all ranks come back in order.

python examples/exact_evaluation.py
python examples/exact_evaluation.py --strategy ddp
"""

import argparse

import torch
from lightning import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_bucketddp import BucketDDPStrategy


class DigitClassifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        return cross_entropy(self.layers(images), labels)

    def test_step(self, batch: list[Tensor]) -> None:
        images, labels = batch
        outputs = self.layers(images)
        self.accuracy(outputs, labels)
        self.log("accuracy", self.accuracy)
        self.log("loss", cross_entropy(outputs, labels), sync_dist=True)
        self.log("images", float(len(images)), sync_dist=True, reduce_fx="sum")

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        images, _ = batch
        return self.layers(images).argmax(dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="processes")
    parser.add_argument("--strategy", choices=("bucketddp", "ddp"), default="bucketddp")
    parser.add_argument("--test-images", type=int, default=103)
    arguments = parser.parse_args()

    seed_everything(0)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
    training = Subset(dataset, range(1000))
    test = Subset(dataset, range(1000, 1000 + arguments.test_images))
    strategy = BucketDDPStrategy(gather_predictions=True) if arguments.strategy == "bucketddp" else "ddp"
    trainer = Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = DigitClassifier()
    trainer.fit(model, DataLoader(training, batch_size=64 // arguments.devices, shuffle=True))
    [tested] = trainer.test(model, DataLoader(test, batch_size=16), verbose=False)
    predicted = trainer.predict(model, DataLoader(test, batch_size=16))

    if trainer.is_global_zero:
        images, labels = (torch.stack(parts) for parts in zip(*test, strict=True))
        with torch.no_grad():
            outputs = model.layers(images)
        guesses, right = torch.cat(predicted), outputs.argmax(dim=1)
        accuracy = (right == labels).float().mean()
        print(f"tested: {tested['images']:.0f} images, accuracy {tested['accuracy']:.3%}, loss {tested['loss']:.5f}")
        print(f"one process: {len(test)} images, accuracy {accuracy:.3%}, loss {cross_entropy(outputs, labels):.5f}")
        if torch.equal(guesses, right):
            accuracy = (guesses == labels).float().mean()
            print(f"predictions on rank 0: {len(guesses)}, all in order, accuracy {accuracy:.3%}")
        else:
            print(f"predictions on rank 0: {len(guesses)}, not those of one process")


if __name__ == "__main__":
    main()
