"""Lightning's callbacks and tuners do with `bucketddp` what they do with `ddp`, on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor

from tests.strategies.comparison import Program, train
from tests.support.cases import for_each
from tests.support.ranks import on_ranks
from tests.support.scripts.models import Regression, loader
from tests.support.scripts.trainers import like_torchrun, make_trainer

STRATEGIES = ("bucketddp", "ddp")


def _weights(module: LightningModule) -> dict[str, Any]:
    return {name: value.tolist() for name, value in module.state_dict().items()}


class Tunable(Regression):
    """Has what the tuners look for."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.05
        self.batch_size = 4

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return loader(batch_size=self.batch_size)


class PredictionFiles(callbacks.BasePredictionWriter):
    def __init__(self, directory: Path) -> None:
        super().__init__("batch_and_epoch")
        self._directory = directory
        self.batches: list[Any] = []

    def write_on_batch_end(self, trainer: Trainer, pl_module: Any, prediction: Tensor, indices: Any, *_: Any) -> None:
        self.batches.append((indices, prediction.tolist()))

    def write_on_epoch_end(self, trainer: Trainer, pl_module: Any, predictions: Any, indices: Any) -> None:
        torch.save((torch.cat(predictions), indices), self._directory / f"rank{trainer.global_rank}.pt")


@on_ranks()
@like_torchrun()
def test_predictions_are_written_like_with_ddp(tmp_path: Path) -> None:
    outcomes = []
    for strategy in STRATEGIES:
        writer = PredictionFiles(tmp_path)
        trained = train(Program(trainer=lambda: {"callbacks": writer}), strategy)  # noqa: B023
        trained.trainer.predict(trained.trainer.lightning_module, loader(), return_predictions=False)
        predictions, indices = torch.load(tmp_path / f"rank{dist.get_rank()}.pt")
        outcomes.append((writer.batches, predictions.tolist(), indices))
    assert outcomes[0] == outcomes[1]
    assert indices[0][0] == list(range(dist.get_rank(), 8, 2))  # each rank has its own samples


@for_each("by_callback", [True, False])
@on_ranks()
@like_torchrun()
def test_the_learning_rate_that_is_found_equals_ddp(by_callback: bool, tmp_path: Path) -> None:
    outcomes = []
    for strategy in STRATEGIES:
        torch.manual_seed(dist.get_rank())
        module = Tunable()
        finder = callbacks.LearningRateFinder(num_training_steps=15) if by_callback else None
        trainer = make_trainer(strategy, max_epochs=2, default_root_dir=tmp_path, callbacks=finder)
        if not by_callback:
            Tuner(trainer).lr_find(module, num_training=15)
        trainer.fit(module)
        outcomes.append((module.lr, _weights(module), trainer.global_step))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] != 0.05
