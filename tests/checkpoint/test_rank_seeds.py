"""`rank_seeds=True`: random numbers of its own for each rank, equal in equal runs, continued by a checkpoint."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support.cases import for_each
from tests.support.ranks import run_on_ranks
from tests.support.scripts import models
from tests.support.scripts.trainers import like_torchrun, make_trainer, said_about, workers_allowed

NUM_SAMPLES = 24

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "after_validation": {"save_on_train_epoch_end": False},
    "end_of_epoch": {"save_on_train_epoch_end": True},
    "after_last_batch": {"every_n_train_steps": 3},
    "within_epoch": {"every_n_train_steps": 2},
}


@dataclass(frozen=True)
class Randomness:
    """The random values of one rank, step by step, and the lines of the log about them."""

    samples: list[Any] = field(default_factory=list)
    augmentations: list[Any] = field(default_factory=list)
    dropout_masks: list[Any] = field(default_factory=list)
    initial_weights: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


class Augmented(Dataset[Any]):
    """Each sample with its index and a number of each generator that augmentations use."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        noise = [torch.rand(()).item(), float(np.random.rand()), random.random()]
        return index, torch.tensor(noise, dtype=torch.float64), torch.full((models.WIDTH,), index / NUM_SAMPLES)


class Dropped(models.Regression):
    """Writes its randomness down; validation draws random numbers too."""

    def __init__(self, seen: Randomness, *, asks_for_steps: bool, torch_seed: int | None) -> None:
        super().__init__()
        self.dropout = nn.Dropout()
        self.seen = seen
        self._asks_for_steps = asks_for_steps
        self._torch_seed = torch_seed

    def setup(self, stage: str) -> None:
        if self._torch_seed is not None:
            torch.manual_seed(self._torch_seed)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        indices, noise, inputs = batch
        mask = self.dropout(torch.ones_like(inputs))
        self.seen.samples.append(indices.tolist())
        self.seen.augmentations.append(noise.tolist())
        self.seen.dropout_masks.append(mask.tolist())
        outputs: Tensor = self.layers(inputs * mask)
        return outputs.square().mean()

    def validation_step(self, batch: list[Tensor]) -> None:
        torch.rand(1)

    def configure_optimizers(self) -> Any:
        if self._asks_for_steps:
            assert self.trainer.estimated_stepping_batches > 0  # creates the iterators of the training data
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self) -> None:
        self.seen.initial_weights.append(_weights(self))


@like_torchrun()
def train(
    *,
    strategy: str | None = None,
    rank_seeds: bool = True,
    seed: int | None = 1,
    torch_seed: int | None = None,
    fits: int = 1,
    max_epochs: int = 2,
    num_workers: int = 0,
    asks_for_steps: bool = False,
    save: str | None = None,
    directory: Path | None = None,
    resume_from: Path | None = None,
    validate_first: Path | None = None,
    load_after_fit: Path | None = None,
    save_to: Path | None = None,
    weights_only: bool = False,
    **options: Any,
) -> Randomness:
    """Train and return what was random."""
    seen = Randomness()
    callbacks = [ModelCheckpoint(directory, filename="{step}", save_top_k=-1, **CHECKPOINTS[save])] if save else []
    with workers_allowed(), said_about("rank_seeds", seen.lines):
        torch.manual_seed(100 + dist.get_rank())  # what processes have that nobody has seeded
        if seed is not None:
            seed_everything(seed, verbose=False)
        trainer = make_trainer(
            strategy or BucketDDPStrategy(rank_seeds=rank_seeds),
            max_epochs=max_epochs,
            callbacks=callbacks,
            enable_checkpointing=save is not None,
            **{"num_sanity_val_steps": 0, "limit_val_batches": 1, **options},
        )
        module = Dropped(seen, asks_for_steps=asks_for_steps, torch_seed=torch_seed)
        if validate_first is not None:
            trainer.validate(module, _loader(0), ckpt_path=validate_first, verbose=False)
        for fit in range(1, fits + 1):
            trainer.fit_loop.max_epochs = fit * max_epochs
            trainer.fit(module, _loader(num_workers), _loader(0), ckpt_path=resume_from)
            if load_after_fit is not None:
                trainer.strategy.load_checkpoint(load_after_fit)
        if save_to is not None:
            trainer.save_checkpoint(save_to, weights_only=weights_only)
    seen.weights.append(_weights(module))
    return seen


def _loader(num_workers: int) -> DataLoader[Any]:
    # Forked workers need not import torch.
    context = "fork" if num_workers else None
    return DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=num_workers, multiprocessing_context=context)


def _weights(module: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in module.state_dict().items()}


@functools.cache
def trained(**options: Any) -> list[Randomness]:
    """Return the randomness of all ranks; train once for equal options."""
    ranks: list[Randomness] = run_on_ranks(train, **options)
    return ranks


def test_with_ddp_and_by_default_all_ranks_drop_and_augment_alike() -> None:
    ddp = trained(strategy="ddp")
    assert ddp[0].dropout_masks == ddp[1].dropout_masks
    assert ddp[0].augmentations == ddp[1].augmentations
    assert trained(strategy="bucketddp") == trained(rank_seeds=False) == ddp


@for_each("options", [{}, {"asks_for_steps": True}, {"num_workers": 1}])
def test_ranks_drop_and_augment_each_in_its_own_way(options: dict[str, Any]) -> None:
    ranks = trained(**options)
    assert all(one != other for one, other in zip(*(rank.dropout_masks for rank in ranks), strict=True))
    noise = [number for rank in ranks for batch in rank.augmentations for sample in batch for number in sample]
    # Of all numbers by torch, numpy and Python, in every epoch on every rank, no two are equal.
    assert len(set(noise)) == len(noise) == 2 * NUM_SAMPLES * 3


def test_what_has_to_be_equal_on_all_ranks_stays_so() -> None:
    ranks, plain = trained(), trained(rank_seeds=False)
    assert [rank.samples for rank in ranks] == [rank.samples for rank in plain]
    assert ranks[0].initial_weights == ranks[1].initial_weights == plain[0].initial_weights
    assert ranks[0].weights == ranks[1].weights != plain[0].weights


def test_equal_runs_give_equal_results_and_other_seeds_others() -> None:
    assert trained() == run_on_ranks(train)
    assert trained()[0].dropout_masks != trained(seed=2)[0].dropout_masks
    # The processes have 100 and 101, and the seed of rank zero counts.
    without, seeded = trained(seed=None), trained(seed=100)
    assert [rank.lines for rank in without] == [rank.lines for rank in seeded]
    assert [rank.dropout_masks for rank in without] == [rank.dropout_masks for rank in seeded]


def test_what_is_drawn_seeded_or_loaded_before_training_does_not_count(tmp_path: Path) -> None:
    assert trained(num_sanity_val_steps=1) == trained()
    trained(max_epochs=1, save_to=tmp_path / "1.ckpt")
    for before in ({"torch_seed": 5}, {"validate_first": tmp_path / "1.ckpt"}):
        assert [rank.dropout_masks for rank in trained(**before)] == [rank.dropout_masks for rank in trained()]
    ranks, plain = (trained(fits=2, max_epochs=1, **loads) for loads in ({"load_after_fit": tmp_path / "1.ckpt"}, {}))
    for rank, expected in zip(ranks, plain, strict=True):
        assert rank.dropout_masks == expected.dropout_masks
        # A second fit does not repeat the first.
        assert rank.dropout_masks[:3] != rank.dropout_masks[3:]


def test_the_seeds_are_logged_in_one_line() -> None:
    seeds = "9140593674255849855 on rank 0, 2062734603205289354 on rank 1"
    line = f"bucketddp: rank_seeds: from seed 1 and step 0: {seeds}."
    assert [rank.lines for rank in trained()] == [[line], []]


@pytest.mark.parametrize(
    ("save", "step", "validates", "num_workers"),
    [
        ("after_validation", 3, 1, 0),
        ("end_of_epoch", 3, 1, 1),
        # Lightning does not make up for the validation that would have come after it.
        ("after_last_batch", 3, 0, 1),
        ("within_epoch", 2, 1, 0),
    ],
)
def test_a_resumed_run_goes_on_with_the_same_random_numbers(
    save: str, step: int, validates: int, num_workers: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "num_workers": num_workers, "limit_val_batches": validates}
    whole = trained(save=save, directory=tmp_path, **options)
    resumed = trained(resume_from=tmp_path / f"step={step}.ckpt", **options)
    line = "bucketddp: rank_seeds: every rank goes on with its random numbers from the checkpoint."
    assert [rank.lines for rank in resumed] == [[line], []]
    for rank, expected in zip(resumed, whole, strict=True):
        assert rank.augmentations == expected.augmentations[step:]
        assert rank.dropout_masks == expected.dropout_masks[step:]
        # Workers take the samples of the first epoch then, also with ddp: Lightning starts them before `set_epoch`.
        # Within an epoch the samples are others, too: an ordinary data loader begins it anew.
        if num_workers == 0 and save != "within_epoch":
            assert rank.samples == expected.samples[step:]
            assert rank.weights == expected.weights


def test_training_longer_goes_on_with_the_same_random_numbers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"asks_for_steps": True}
    trained(max_epochs=1, save_to=tmp_path / "1.ckpt", **options)
    for rank, expected in zip(trained(resume_from=tmp_path / "1.ckpt", **options), trained(**options), strict=True):
        assert rank.augmentations == expected.augmentations[3:]
        assert rank.dropout_masks == expected.dropout_masks[3:]
        assert rank.weights == expected.weights


@pytest.mark.parametrize(
    ("saved", "held"), [({"world_size": 1}, "is from 1 rank(s)"), ({"strategy": "ddp"}, "holds no random states")]
)
def test_a_checkpoint_that_cannot_go_on_is_warned_about_and_gives_new_seeds(
    saved: dict[str, Any], held: str, tmp_path: Path
) -> None:
    trained(max_epochs=1, save_to=tmp_path / "1.ckpt", **saved)
    step = torch.load(tmp_path / "1.ckpt", weights_only=True)["global_step"]
    ranks = trained(resume_from=tmp_path / "1.ckpt")
    [warning] = ranks[0].lines
    assert warning.startswith(
        f"bucketddp: rank_seeds: the checkpoint {held} and this run has 2, so random numbers do not go on where they"
        f" were. New ones: from seed 1 and step {step}: "
    )
    assert ranks[0].dropout_masks != ranks[1].dropout_masks


def test_only_checkpoints_that_ask_for_it_hold_random_states(tmp_path: Path) -> None:
    path = tmp_path / "1.ckpt"
    trained(max_epochs=1, save_to=path)
    assert len(torch.load(path, weights_only=True)["bucketddp"]["rank_seeds"]["states"]) == 2
    for options in ({"rank_seeds": False}, {"weights_only": True}):
        trained(max_epochs=1, save_to=path, **options)
        assert "bucketddp" not in torch.load(path, weights_only=True)
