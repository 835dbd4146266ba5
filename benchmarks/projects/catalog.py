"""The projects that are trained; each has a file of its name here, which holds what a user would write."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Project:
    """A package from PyPI, and a training of one of its models.

    Attributes:
        package: its name on PyPI.
        trained: what is trained.
        through: who calls Lightning, and by which root.
        ddp: the strategy that it is compared with.
    """

    package: str
    trained: str
    through: str
    ddp: str = "ddp"

    @property
    def module(self) -> str:
        """Return the name of its file."""
        return self.package.replace("-", "_")


PROJECTS = [
    Project("chemprop", "message passing network", "`lightning`"),
    Project("darts", "N-BEATS", "the package, `pytorch_lightning`"),
    Project("gluonts", "DeepAR", "the package, `lightning`"),
    Project("litgpt", "GPT", "Fabric"),
    Project("neuralforecast", "N-HiTS", "the package, `pytorch_lightning`"),
    Project("peft", "LoRA on a frozen GPT-2, random weights", "`lightning`"),
    Project("pytorch-forecasting", "temporal fusion transformer", "`lightning`"),
    Project(
        "pytorch-tabular",
        "FT-Transformer",
        "the package, `pytorch_lightning`",
        ddp="ddp_find_unused_parameters_true",
    ),
    Project(
        "scvi-tools",
        "SCVI, a variational autoencoder",
        "the package, `lightning`",
        ddp="ddp_find_unused_parameters_true",
    ),
    Project("torch-geometric", "graph convolutional network", "`pytorch_lightning`"),
    Project("transformers", "BERT, random weights", "`lightning`"),
]
