"""Fine-tunes a backbone: frozen at first, unfrozen in the middle of training by `BackboneFinetuning`.

python examples/fine_tuning.py
"""

import argparse

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def make_backbone() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
    )


class Classifier(LightningModule):
    def __init__(self, backbone: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(64, num_classes)
        self.accuracies: list[float] = []

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        return cross_entropy(self(images), labels)

    def validation_step(self, batch: list[Tensor]) -> None:
        images, labels = batch
        self.log("accuracy", (self(images).argmax(dim=1) == labels).float().mean(), prog_bar=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.accuracies.append(self.trainer.callback_metrics["accuracy"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # The callback adds the backbone's parameters when it unfreezes them; `bucketddp` then plans for them, too.
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=2e-3)


def loaders(*digits: int) -> tuple[DataLoader, DataLoader]:
    """Return images of some digits, for training and for validation, with labels from 0 on."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target) - min(digits)
    chosen = torch.isin(labels + min(digits), torch.tensor(digits)).nonzero().flatten()
    training, validation = chosen[: len(chosen) * 4 // 5], chosen[len(chosen) * 4 // 5 :]
    return (
        DataLoader(TensorDataset(images[training], labels[training]), batch_size=16, shuffle=True),
        DataLoader(TensorDataset(images[validation], labels[validation]), batch_size=64),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pretrain-epochs", type=int, default=3)
    parser.add_argument("--max-epochs", type=int, default=8)
    parser.add_argument("--unfreeze-at-epoch", type=int, default=4)
    parser.add_argument("--devices", type=int, default=2)
    arguments = parser.parse_args()
    options = {
        "accelerator": "cpu",
        "devices": arguments.devices,
        "strategy": "bucketddp",
        "logger": False,
        "enable_checkpointing": False,
    }

    seed_everything(0)
    backbone = make_backbone()
    # Yours comes from a file or a model zoo; this one learns the digits from 0 to 4 ...
    Trainer(max_epochs=arguments.pretrain_epochs, **options).fit(Classifier(backbone, 5), *loaders(0, 1, 2, 3, 4))

    # ... and is then used for the others.
    model = Classifier(backbone, 5)
    unfreezing = BackboneFinetuning(
        unfreeze_backbone_at_epoch=arguments.unfreeze_at_epoch, backbone_initial_lr=1e-3, lambda_func=lambda _: 1.0
    )
    trainer = Trainer(max_epochs=arguments.max_epochs, callbacks=unfreezing, **options)
    trainer.fit(model, *loaders(5, 6, 7, 8, 9))

    if trainer.is_global_zero:
        frozen = model.accuracies[arguments.unfreeze_at_epoch - 1]
        print(f"validation accuracy: {frozen:.1%} with the backbone frozen, {model.accuracies[-1]:.1%} at the end")


if __name__ == "__main__":
    main()
