"""`bucket_cap_mb="auto"`: a plan is computed, tried and kept if it is better, on all ranks at the same backward."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp.planning.cost import Profile, simulate
from lightning_bucketddp.planning.optimal_plan import optimal_plan
from lightning_bucketddp.reducer.plan_cache import NUM_OBSERVED, NUM_WARM_UP
from tests.support.cases import for_each
from tests.support.jobs.tuning import (
    WIDTH,
    Layers,
    Training,
    Tuned,
    keep_gradients_across_changes,
    leaves_out_in_turns,
    let_go_of_old_buffers,
    train_alone,
    train_beside_torch_ddp,
    train_in_turns,
    train_with,
)
from tests.support.ranks import run_on_ranks
from tests.support.scripts.fit import weights
from tests.support.scripts.shown import lines_on_terminal
from tests.support.scripts.trainers import like_torchrun, make_trainer


class Wide(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = Layers()
        self.has_profile = False
        self.num_plans = 0

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.model(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_end(self) -> None:
        reducer = getattr(self.trainer.strategy, "reducer", None)
        if reducer is not None:
            self.has_profile = reducer.profile is not None
            self.num_plans = reducer.stats.num_plans


@dataclass(frozen=True)
class Fitted:
    weights: dict[str, str]
    has_profile: bool
    num_plans: int


def fit_wide(*, strategy: str, deterministic: bool, accumulate: int) -> Fitted:
    """25 optimizer steps."""
    before = torch.are_deterministic_algorithms_enabled()
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(2 * 2 * 25 * accumulate, WIDTH, generator=generator))
    module = Wide()
    options: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": accumulate, "deterministic": deterministic}
    try:
        with like_torchrun():
            trainer = make_trainer(strategy, **options)
            trainer.fit(module, DataLoader(data, batch_size=2))
    finally:
        torch.use_deterministic_algorithms(before)
    assert trainer.global_step == 25
    return Fitted(weights(module), module.has_profile, module.num_plans)


# The first backward has no plan; then come those of the first plan, and those of the computed one.
CHANGED_AT = 1 + NUM_WARM_UP + NUM_OBSERVED
SETTLED_AT = CHANGED_AT + NUM_WARM_UP + NUM_OBSERVED
NUM_PARAMS = 12


def num_buckets(rank: Tuned) -> list[int]:
    return [len(plan) for plan in rank.plans]


def test_twenty_backwards_are_enough() -> None:
    assert SETTLED_AT <= 20


# --- Results are those of torch DDP, whatever the plan does


@pytest.mark.parametrize(
    "training",
    [
        Training(),
        Training(micro_batches=4),
        Training(set_to_none=False),
        Training(set_to_none=False, micro_batches=2),
        Training(leaves_out=leaves_out_in_turns),
        Training(slower_at=CHANGED_AT, micro_batches=2),
    ],
    ids=["plain", "accumulating", "zeroed", "zeroed_accumulating", "unused", "falling_back"],
)
@pytest.mark.sampled(3)
def test_training_across_changes_equals_torch_ddp(training: Training) -> None:
    ranks = run_on_ranks(train_beside_torch_ddp, training=training)
    assert ranks[0].plans == ranks[1].plans
    plans = ranks[0].plans
    assert len(plans) == training.steps
    assert plans[0] == plans[CHANGED_AT - 1] != plans[CHANGED_AT] == plans[SETTLED_AT - 1]
    assert plans[-1] == (plans[0] if training.slower_at else plans[CHANGED_AT])
    for plan in plans:
        assert sorted(i for bucket in plan for i in bucket) == list(range(NUM_PARAMS))


def test_three_ranks_have_the_same_plan_at_each_step() -> None:
    ranks = run_on_ranks(train_beside_torch_ddp, world_size=3, training=Training(tolerance=1e-5))
    assert ranks[0].plans == ranks[1].plans == ranks[2].plans
    assert num_buckets(ranks[0]) == [3] * CHANGED_AT + [1] * (30 - CHANGED_AT)


@pytest.mark.parametrize("freezes_at", [CHANGED_AT - 2, CHANGED_AT, SETTLED_AT + 1])
def test_a_layer_that_is_frozen_meanwhile_begins_anew(freezes_at: int) -> None:
    steps = freezes_at + SETTLED_AT + 3
    ranks = run_on_ranks(train_beside_torch_ddp, training=Training(steps=steps, freezes_at=freezes_at))
    assert ranks[0].plans == ranks[1].plans
    members = [sorted(i for bucket in plan for i in bucket) for plan in ranks[0].plans]
    still_trained = [i for i in range(NUM_PARAMS) if i not in (2, 3)]
    assert members == [list(range(NUM_PARAMS))] * freezes_at + [still_trained] * (steps - freezes_at)
    assert num_buckets(ranks[0])[freezes_at:] == [3] * CHANGED_AT + [1] * (steps - freezes_at - CHANGED_AT)


def test_kept_gradients_stay_as_they_are() -> None:
    for rank in run_on_ranks(keep_gradients_across_changes):
        assert rank == [True] * (20 * NUM_PARAMS)


def test_old_buffers_are_gone_before_there_are_new_ones() -> None:
    for rank in run_on_ranks(let_go_of_old_buffers):
        assert rank == [0, 0]


def test_sets_that_take_turns_are_tuned_each_for_itself() -> None:
    for rank in run_on_ranks(train_in_turns):
        assert rank == [(NUM_PARAMS, 3)] * (2 * CHANGED_AT) + [(NUM_PARAMS, 1)] * (44 - 2 * CHANGED_AT)


# --- Decisions


def test_what_is_better_stays_and_nothing_else_is_left() -> None:
    ranks = run_on_ranks(train_with, steps=SETTLED_AT + 1)
    for rank in ranks:
        assert num_buckets(rank) == [3] * CHANGED_AT + [1] * (SETTLED_AT + 1 - CHANGED_AT)
        assert rank.num_plans == 2
        assert re.fullmatch(r"12 parameter tensors in 1 bucket \(2\.07 MiB\), computed", rank.description)
    assert [len(rank.messages) for rank in ranks] == [1, 0]
    assert re.fullmatch(
        r"bucketddp: 1 bucket instead of 3: backward with reductions predicted to take \d+\.\d\d instead of"
        r" \d+\.\d\d ms, measured \d+\.\d\d instead of \d+\.\d\d ms; they stay\.",
        ranks[0].messages[0],
    )


def test_what_measures_worse_is_taken_back() -> None:
    training = Training(steps=SETTLED_AT + 2, slower_at=CHANGED_AT)
    ranks = run_on_ranks(train_beside_torch_ddp, training=training)
    for rank in ranks:
        assert num_buckets(rank) == [3] * CHANGED_AT + [1] * (SETTLED_AT - CHANGED_AT) + [3] * 2
        assert rank.plans[-1] == rank.plans[0]
        assert not rank.description.endswith("computed")
    assert ranks[0].messages[0].endswith("; back to 3.")


def test_what_promises_nothing_is_not_tried() -> None:
    ranks = run_on_ranks(train_with, network={"latency_s": 0, "s_per_byte": 0})
    for rank in ranks:
        assert num_buckets(rank) == [3] * 20
        assert rank.num_plans == 1
    assert ranks[0].messages == ["bucketddp: 3 buckets of up to 25 MiB stay, no other plan promises to be faster."]


def test_the_profile_has_the_costs_that_the_plan_was_computed_for() -> None:
    """Whoever simulates other plans with it finds none that is better, and expects of this one what was expected."""
    network = {"latency_s": 1e-3, "s_per_byte": 4e-9, "contention": 3.0}
    [rank, _] = run_on_ranks(train_with, network=network)
    assert rank.profile is not None
    profile = Profile.from_json(rank.profile)
    assert profile.cost is not None
    assert profile.cost.seconds(10**6) == pytest.approx(3 * 5e-3, rel=0.1)
    names = [f"layers.{i}.{kind}" for i in range(6) for kind in ("weight", "bias")]
    tried = [{names[i] for i in bucket} for bucket in rank.plans[CHANGED_AT]]
    best = optimal_plan(profile)
    assert [{profile.specs[i].name for i in bucket.members} for bucket in best] == tried != [set(names)]
    [message] = rank.messages
    assert f"predicted to take {1e3 * simulate(profile, best, profile.cost).end_s:.2f} instead of " in message
    assert message == f"bucketddp: {rank.tuning}."


@for_each(
    "options",
    [
        {"deterministic": True},
        {"overlap": False},
        {"comm_hook": "allreduce_hook"},
        {"bucket_cap_mb": 25},
        {"bucket_cap_mb": None},
        {"bucket_cap_mb": [1.0, 5.0]},
    ],
)
def test_plans_that_must_not_depend_on_time_do_not(options: dict[str, Any]) -> None:
    for rank in run_on_ranks(train_with, **options):
        assert [plan == rank.plans[0] for plan in rank.plans] == [True] * 20
        assert (rank.num_plans, rank.profile, rank.messages) == (1, None, [])


def test_a_deterministic_plan_is_that_of_25_mib() -> None:
    [deterministic, *_] = run_on_ranks(train_with, deterministic=True)
    [fixed, *_] = run_on_ranks(train_with, bucket_cap_mb=25)
    assert deterministic.plans == fixed.plans


def test_a_rank_alone_has_nothing_to_tune() -> None:
    for rank in run_on_ranks(train_alone):
        assert num_buckets(rank) == [3] * 20
        assert (rank.num_plans, rank.profile) == (1, None)


# --- With the clock of the machine


@pytest.mark.parametrize("reduce_dtype", [None, pytest.param("bf16", marks=pytest.mark.long)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_real_measurements_settle_in_time(world_size: int, reduce_dtype: str | None) -> None:
    ranks = run_on_ranks(train_with, world_size=world_size, virtual=False, reduce_dtype=reduce_dtype)
    for rank in ranks:
        assert rank.plans == ranks[0].plans
        assert rank.plans[SETTLED_AT:] == [rank.plans[SETTLED_AT]] * (20 - SETTLED_AT)
    assert len(ranks[0].messages) == 1
    assert [rank.profile is None for rank in ranks] == [False] + [True] * (world_size - 1)
    profile = Profile.from_json(ranks[0].profile)
    assert sorted(spec.name for spec in profile.specs) == sorted(
        f"layers.{i}.{kind}" for i in range(6) for kind in ("weight", "bias")
    )
    assert list(profile.ready_s) == sorted(profile.ready_s)
    assert 0 < profile.ready_s[0] < profile.ready_s[-1] <= profile.backward_s < 60
    assert (profile.num_ranks, profile.reduce_dtype) == (world_size, reduce_dtype)
    assert profile.cost is not None
    assert profile.cost.seconds(0) >= 0
    assert profile.cost.seconds(2**20) > 0


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.sampled(2)
def test_a_trainer_tunes_unless_it_is_deterministic_and_trains_as_ddp(deterministic: bool, accumulate: int) -> None:
    options: dict[str, Any] = {"deterministic": deterministic, "accumulate": accumulate}
    theirs = run_on_ranks(fit_wide, strategy="ddp", **options)
    ours = run_on_ranks(fit_wide, strategy="bucketddp", **options)
    assert [rank.weights for rank in ours] == [rank.weights for rank in theirs]
    assert [rank.has_profile for rank in ours] == [not deterministic, False]
    if deterministic:
        assert [rank.num_plans for rank in ours] == [1, 1]


@pytest.mark.parametrize("root", ["lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"])
def test_what_was_decided_is_shown_to_who_has_configured_no_logging(root: str, tmp_path: Path) -> None:
    lines, on_rank_one = run_on_ranks(lines_on_terminal, root=root, directory=str(tmp_path))
    start, decision = lines
    has_trainer = "fabric" not in root
    gradients = "; 3 buckets planned for 2.07 MiB of gradients, sent as fp32" if has_trainer else ""
    assert start == f"bucketddp: 2 ranks (gloo){gradients}."
    # A fit tells it when it is over, with what else was done; Fabric does not know when that is.
    done = r"20 optimizer steps; \d+\.\d MiB sent per rank in \d+ reductions; (last plan: \d+ buckets?; )?"
    saved = r"; 1 checkpoint held up training for \d+\.\d{3} s"
    decided = r"(.*; (they stay|back to 3)|3 buckets of up to 25 MiB stay, .*)"
    expected = f"bucketddp: {done}{decided}{saved}" if has_trainer else f"bucketddp: {decided}"
    assert re.fullmatch(rf"{expected}\.", decision)
    assert on_rank_one == []
