"""`rank_seeds=True`: random numbers of its own for each rank, equal in equal runs, continued by a checkpoint."""

from __future__ import annotations

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
    """What one rank has seen, step by step, and the lines about it."""

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
    strategy: str = "bucketddp",
    rank_seeds: bool | None = None,
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
    save_to: Path | None = None,
    weights_only: bool = False,
    validates: bool = True,
    num_sanity_val_steps: int = 0,
) -> Randomness:
    """Train and tell what was random."""
    seen = Randomness()
    callbacks = [ModelCheckpoint(directory, filename="{step}", save_top_k=-1, **CHECKPOINTS[save])] if save else []
    with workers_allowed(), said_about("rank_seeds", seen.lines):
        torch.manual_seed(100 + dist.get_rank())  # what processes have that nobody has seeded
        if seed is not None:
            seed_everything(seed, verbose=False)
        trainer = make_trainer(
            strategy if rank_seeds is None else BucketDDPStrategy(rank_seeds=rank_seeds),
            max_epochs=max_epochs,
            callbacks=callbacks,
            enable_checkpointing=save is not None,
            num_sanity_val_steps=num_sanity_val_steps,
            limit_val_batches=1 if validates else 0,
        )
        module = Dropped(seen, asks_for_steps=asks_for_steps, torch_seed=torch_seed)
        if validate_first is not None:
            trainer.validate(module, _loader(0), ckpt_path=validate_first, verbose=False)
        for fit in range(1, fits + 1):
            trainer.fit_loop.max_epochs = fit * max_epochs
            trainer.fit(module, _loader(num_workers), _loader(0), ckpt_path=resume_from)
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


def test_with_ddp_and_by_default_all_ranks_drop_and_augment_alike() -> None:
    ddp = run_on_ranks(train, strategy="ddp")
    assert ddp[0].dropout_masks == ddp[1].dropout_masks
    assert ddp[0].augmentations == ddp[1].augmentations
    for ours, theirs in zip(run_on_ranks(train, strategy="bucketddp"), ddp, strict=True):
        assert ours == theirs
    for ours, theirs in zip(run_on_ranks(train, rank_seeds=False), ddp, strict=True):
        assert ours == theirs


@pytest.mark.parametrize("asks_for_steps", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_drop_and_augment_each_in_its_own_way(num_workers: int, asks_for_steps: bool) -> None:
    ranks = run_on_ranks(train, rank_seeds=True, num_workers=num_workers, asks_for_steps=asks_for_steps)
    for step in range(len(ranks[0].samples)):
        assert ranks[0].dropout_masks[step] != ranks[1].dropout_masks[step]
    noise = [numbers(rank) for rank in ranks]
    # Of all numbers by torch, numpy and Python, in every epoch on every rank, no two are equal.
    assert len(set(noise[0]) | set(noise[1])) == 2 * len(noise[0]) == 2 * NUM_SAMPLES * 3


def numbers(rank: Randomness) -> list[float]:
    return [number for batch in rank.augmentations for sample in batch for number in sample]


def test_what_has_to_be_equal_on_all_ranks_stays_so() -> None:
    ranks = run_on_ranks(train, rank_seeds=True)
    plain = run_on_ranks(train, rank_seeds=False)
    assert [rank.samples for rank in ranks] == [rank.samples for rank in plain]
    assert ranks[0].initial_weights == ranks[1].initial_weights == plain[0].initial_weights
    assert ranks[0].weights == ranks[1].weights != plain[0].weights


def test_equal_runs_give_equal_results_and_other_seeds_others() -> None:
    first, again, other = (run_on_ranks(train, rank_seeds=True, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first[0].dropout_masks != other[0].dropout_masks


def test_a_sanity_check_changes_no_random_number() -> None:
    assert run_on_ranks(train, rank_seeds=True, num_sanity_val_steps=1) == run_on_ranks(train, rank_seeds=True)


def test_a_second_fit_does_not_repeat_the_first() -> None:
    for rank in run_on_ranks(train, rank_seeds=True, fits=2, max_epochs=1):
        assert rank.dropout_masks[:3] != rank.dropout_masks[3:]


def test_the_seeds_are_logged_in_one_line() -> None:
    [line], on_rank_one = (rank.lines for rank in run_on_ranks(train, rank_seeds=True))
    seeds = "9140593674255849855 on rank 0, 2062734603205289354 on rank 1"
    assert line == f"bucketddp: rank_seeds: from seed 1 and step 0: {seeds}."
    assert on_rank_one == []


def test_without_seed_everything_the_seed_of_rank_zero_counts() -> None:
    # The processes have 100 and 101.
    ranks = run_on_ranks(train, rank_seeds=True, seed=None)
    seeded = run_on_ranks(train, rank_seeds=True, seed=100)
    assert [rank.lines for rank in ranks] == [rank.lines for rank in seeded]
    assert [rank.dropout_masks for rank in ranks] == [rank.dropout_masks for rank in seeded]


def test_what_is_drawn_or_seeded_before_training_does_not_count() -> None:
    ranks = run_on_ranks(train, rank_seeds=True, seed=1, torch_seed=5)
    plain = run_on_ranks(train, rank_seeds=True, seed=1)
    assert [rank.dropout_masks for rank in ranks] == [rank.dropout_masks for rank in plain]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("save", "step", "validates"),
    [
        ("after_validation", 3, True),
        ("end_of_epoch", 3, True),
        ("end_of_epoch", 6, False),
        # Lightning does not make up for the validation that would have come after it.
        ("after_last_batch", 3, False),
    ],
)
@pytest.mark.sampled(3)
def test_a_resumed_run_goes_on_with_the_same_random_numbers(
    save: str, step: int, validates: bool, num_workers: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"rank_seeds": True, "max_epochs": 3, "num_workers": num_workers, "validates": validates}
    whole = run_on_ranks(train, save=save, directory=tmp_path, **options)
    resumed = run_on_ranks(train, resume_from=tmp_path / f"step={step}.ckpt", **options)
    for rank, expected in zip(resumed, whole, strict=True):
        assert rank.augmentations == expected.augmentations[step:]
        assert rank.dropout_masks == expected.dropout_masks[step:]
        # Workers take the samples of the first epoch then, also with ddp: Lightning starts them before it says which.
        if num_workers == 0:
            assert rank.samples == expected.samples[step:]
            assert rank.weights == expected.weights


def test_resuming_within_an_epoch_goes_on_with_the_same_random_numbers(tmp_path: Path) -> None:
    whole = run_on_ranks(train, rank_seeds=True, save="within_epoch", directory=tmp_path)
    resumed = run_on_ranks(train, rank_seeds=True, resume_from=tmp_path / "step=2.ckpt")
    for rank, expected in zip(resumed, whole, strict=True):
        # The samples are others: an ordinary data loader begins the epoch anew.
        assert rank.augmentations == expected.augmentations[2:]
        assert rank.dropout_masks == expected.dropout_masks[2:]


@pytest.mark.parametrize("asks_for_steps", [False, True])
def test_training_longer_goes_on_with_the_same_random_numbers(asks_for_steps: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"rank_seeds": True, "asks_for_steps": asks_for_steps}
    whole = run_on_ranks(train, max_epochs=2, **options)
    run_on_ranks(train, max_epochs=1, save_to=tmp_path / "1.ckpt", **options)
    resumed = run_on_ranks(train, max_epochs=2, resume_from=tmp_path / "1.ckpt", **options)
    for rank, expected in zip(resumed, whole, strict=True):
        assert rank.augmentations == expected.augmentations[3:]
        assert rank.dropout_masks == expected.dropout_masks[3:]
        assert rank.weights == expected.weights


def test_a_checkpoint_that_goes_on_says_so(tmp_path: Path) -> None:
    run_on_ranks(train, rank_seeds=True, max_epochs=1, save_to=tmp_path / "1.ckpt")
    rank_zero, _ = run_on_ranks(train, rank_seeds=True, resume_from=tmp_path / "1.ckpt")
    assert rank_zero.lines == ["bucketddp: rank_seeds: every rank goes on with its random numbers from the checkpoint."]


@pytest.mark.parametrize(
    ("saved", "held"),
    [
        ({"rank_seeds": True, "world_size": 1}, "is from 1 rank(s)"),
        ({"strategy": "ddp"}, "holds no random states"),
    ],
)
def test_a_checkpoint_that_cannot_go_on_is_warned_about_and_gives_new_seeds(
    saved: dict[str, Any], held: str, tmp_path: Path
) -> None:
    run_on_ranks(train, max_epochs=1, save_to=tmp_path / "1.ckpt", **saved)
    step = torch.load(tmp_path / "1.ckpt", weights_only=True)["global_step"]
    ranks = run_on_ranks(train, rank_seeds=True, max_epochs=2, resume_from=tmp_path / "1.ckpt")
    [warning] = ranks[0].lines
    assert warning.startswith(
        f"bucketddp: rank_seeds: the checkpoint {held} and this run has 2, so random numbers do not go on where they"
        f" were. New ones: from seed 1 and step {step}: "
    )
    assert ranks[0].dropout_masks != ranks[1].dropout_masks


def test_only_checkpoints_that_ask_for_it_hold_random_states(tmp_path: Path) -> None:
    run_on_ranks(train, rank_seeds=True, max_epochs=1, save_to=tmp_path / "with.ckpt")
    run_on_ranks(train, rank_seeds=False, max_epochs=1, save_to=tmp_path / "without.ckpt")
    loaded = torch.load(tmp_path / "with.ckpt", weights_only=True)
    assert len(loaded["bucketddp"]["rank_seeds"]["states"]) == 2
    assert "bucketddp" not in torch.load(tmp_path / "without.ckpt", weights_only=True)
    run_on_ranks(train, rank_seeds=True, max_epochs=1, save_to=tmp_path / "weights.ckpt", weights_only=True)
    assert "bucketddp" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)


def test_a_checkpoint_that_was_only_validated_changes_no_random_number(tmp_path: Path) -> None:
    run_on_ranks(train, rank_seeds=True, max_epochs=1, save_to=tmp_path / "1.ckpt")
    validated = run_on_ranks(train, rank_seeds=True, validate_first=tmp_path / "1.ckpt")
    plain = run_on_ranks(train, rank_seeds=True)
    assert [rank.dropout_masks for rank in validated] == [rank.dropout_masks for rank in plain]
