"""Two networks against each other: manual optimization, two optimizers that are toggled.

python examples/gan.py
"""

import argparse

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset


class PointsOnACircle(LightningModule):
    """The generator learns to place points on a circle that only the discriminator has seen."""

    def __init__(self, noise_size: int = 8) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.noise_size = noise_size
        self.generator = nn.Sequential(
            nn.Linear(noise_size, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
        )
        self.discriminator = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def generate(self, num_points: int) -> Tensor:
        return self.generator(torch.randn(num_points, self.noise_size, device=self.device))

    def training_step(self, batch: list[Tensor]) -> None:
        [real] = batch
        of_generator, of_discriminator = self.optimizers()

        # While this optimizer is toggled, the other network's parameters get no gradients, and none are sent.
        self.toggle_optimizer(of_discriminator)
        loss = self._loss(real, is_real=True) + self._loss(self.generate(len(real)).detach(), is_real=False)
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)
        self.log("discriminator", loss, prog_bar=True)

        self.toggle_optimizer(of_generator)
        loss = self._loss(self.generate(len(real)), is_real=True)
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.log("generator", loss, prog_bar=True)

    def _loss(self, points: Tensor, *, is_real: bool) -> Tensor:
        answers = self.discriminator(points)
        return binary_cross_entropy_with_logits(answers, torch.full_like(answers, float(is_real)))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.99)),
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99)),
        ]

    @torch.no_grad()
    def distance_to_circle(self) -> float:
        return (self.generate(1000).norm(dim=1) - 1).abs().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-epochs", type=int, default=20)
    parser.add_argument("--devices", type=int, default=2)
    arguments = parser.parse_args()

    seed_everything(0)
    angles = 2 * torch.pi * torch.rand(8192)
    points = torch.stack([angles.cos(), angles.sin()], dim=1)
    model = PointsOnACircle()
    distance_before = model.distance_to_circle()
    trainer = Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy="bucketddp",
        max_epochs=arguments.max_epochs,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(points), batch_size=128, shuffle=True))

    if trainer.is_global_zero:
        print(f"mean distance to the circle: {distance_before:.2f} -> {model.distance_to_circle():.2f}")


if __name__ == "__main__":
    main()
