"""Replicas that are not equal: noticed within so many steps and before each checkpoint, named, and raised or healed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy as FabricStrategy
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.config import OnDivergence, ReplicaChecks
from lightning_bucketddp.replicas.consistency import Checksums, find_divergence, units_of
from tests.support.cases import for_each
from tests.support.jobs import replicas
from tests.support.ranks import run_on_ranks
from tests.support.scripts.replicas import (
    HEALTHY,
    Outcome,
    accumulate_differently_in_fabric,
    drift,
    drift_in_fabric,
    freeze_on_one_rank,
    num_collectives,
    other_shape_without_init_sync,
    refusal,
    train_healthy,
)

HEAL = ReplicaChecks(on_divergence="heal")
REMEDY = "or pass `replica_checks=ReplicaChecks(on_divergence='heal')` to the strategy: all ranks then go on"
FOLLOWS = "All ranks go on with the state of rank {}."
FROZEN = "ReplicaMismatchError: `layers.0.weight` has requires_grad True on rank 0 but False on rank 1."
NOT_EQUAL = "The replicas are not equal"


def checksum(tensor: torch.Tensor) -> int:
    [value] = Checksums().start([[tensor]])()
    return value


def assert_equal(ranks: list[Outcome]) -> None:
    """Weights, buffers and optimizer state, bit by bit."""
    for rank in ranks[1:]:
        torch.testing.assert_close(rank.weights, ranks[0].weights, rtol=0, atol=0)
        torch.testing.assert_close(rank.optimizer, ranks[0].optimizer, rtol=0, atol=0)


def logged_on(ranks: list[Outcome]) -> list[str]:
    """The lines of rank 0; the other ranks have none."""
    assert not any(rank.logged for rank in ranks[1:])
    return ranks[0].logged


# --- Checksums


@for_each("dtype", replicas.DTYPES)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    replicas.every_bit_counts(dtype)


def test_truth_values_nothing_and_numbers_that_are_none_have_checksums() -> None:
    assert checksum(torch.tensor([True, False])) != checksum(torch.tensor([True, True]))
    assert checksum(torch.empty(0, 3)) == checksum(torch.empty(0))
    not_numbers = torch.tensor([float("nan"), float("-inf")])
    assert checksum(not_numbers) == checksum(not_numbers.clone())
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))


@for_each("numel", [6, 300_000])
def test_swapped_values_and_opposite_changes_count(numel: int) -> None:
    numbers = torch.arange(numel)  # one word each
    swapped, moved = numbers.clone(), numbers.clone()
    swapped[[0, 5]] = swapped[[5, 0]]
    moved[0] += 1
    moved[5] -= 1
    assert len({checksum(numbers), checksum(swapped), checksum(moved)}) == 3


def test_layouts_that_are_not_contiguous_have_checksums() -> None:
    images = torch.randn(2, 3, 4, 5)
    in_other_order = images.to(memory_format=torch.channels_last)
    assert checksum(in_other_order) == checksum(in_other_order.clone()) != checksum(images)
    assert checksum(torch.ones(1).expand(6)) == checksum(torch.ones(6))
    numbers = torch.randn(9)
    assert checksum(numbers[1:6]) == checksum(numbers[1:6].clone())
    assert checksum(numbers[::2]) == checksum(numbers[::2].clone())
    conjugate = torch.randn(4, dtype=torch.complex64).conj()
    assert checksum(conjugate) == checksum(conjugate.resolve_conj())


def test_small_tensors_share_a_checksum() -> None:
    small, large = [torch.ones(3), torch.zeros(()), torch.ones(5)], torch.ones(2**17)
    units = units_of([small[0], large, *small[1:]])
    assert [len(unit) for unit in units] == [1, 3]
    before = Checksums().start(units)()
    replicas.flip_bit(small[2], 7)
    after = Checksums().start(units)()
    assert (before[0] == after[0], before[1] == after[1]) == (True, False)


# --- Votes


@for_each(
    ("values", "source", "text"),
    [
        ([{"w": 1}, {"w": 2}], 0, "`w` differs between rank 0 and rank 1."),
        ([{"w": 1}, {"w": 1}, {"w": 2}], 0, "`w` on rank 2 differs from that on the other ranks."),
        ([{"w": 2}, {"w": 1}, {"w": 1}], 1, "`w` on rank 0 differs from that on the other ranks."),
        ([{"w": 1}, {"w": 2}, {"w": 3}], 0, "`w` differs between rank 0 and rank 1 and rank 2."),
        ([{"w": 1}, {"w": 2}, {"w": 2}, {"w": 1}], 0, "`w` differs between ranks 0, 3 and ranks 1, 2."),
        (
            [{"w": 2, "v": 1}, {"w": 1, "v": 2}, {"w": 1, "v": 1}, {"w": 1, "v": 1}],
            2,
            "`w` on rank 0 differs from that on the other ranks; `v` on rank 1 differs from that on the other ranks.",
        ),
        ([{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.1}], 0, "`lr` is 0.1 on ranks 0, 2 but 0.2 on rank 1."),
        ([{"w": 1}, {}, {"w": 1}], 0, "`w` exists on ranks 0, 2 but not on rank 1."),
        (
            [dict.fromkeys("abcde", 1), dict.fromkeys("abcde", 2)],
            0,
            "`a` differs between rank 0 and rank 1; `b` differs between rank 0 and rank 1; `c` differs between rank 0"
            " and rank 1; and 2 more.",
        ),
    ],
)
def test_most_ranks_are_right(values: list[dict[str, Any]], source: int, text: str) -> None:
    divergence = find_divergence(dict(enumerate(values)), numbers={"lr"})
    assert divergence is not None
    assert divergence.source == source
    assert str(divergence).startswith(f"{text} Hardware that flips bits, or code")


def test_equal_values_do_not_diverge() -> None:
    assert find_divergence({rank: {"w": 1, "lr": 0.1} for rank in range(3)}, numbers={"lr"}) is None


# --- Periodic checks


@pytest.mark.parametrize(
    ("of", "name"),
    [
        ("weight", "`layers.0.weight`"),
        ("moment", "`optimizer 0: exp_avg of layers.0.weight`"),
        ("counter", "`optimizer 0: step of layers.0.weight`"),
        ("learning_rate", "`optimizer 0: lr of group 0` is 0.01 on rank 0 but 0.02 on rank 1"),
    ],
)
@pytest.mark.sampled(1)
def test_drift_is_raised_on_every_rank_two_steps_after_a_check(of: str, name: str) -> None:
    ranks = run_on_ranks(drift, of=of, replica_checks=3)
    for rank in ranks:
        assert rank.error is not None
        assert rank.error.startswith(f"ReplicaDivergedError: {NOT_EQUAL} after 5 synchronised backwards: ")
        assert name in rank.error
        assert REMEDY in rank.error
    assert logged_on(ranks) == []


@for_each("of", ["weight", "moment", "counter", "learning_rate"])
def test_drift_is_healed(of: str) -> None:
    ranks = run_on_ranks(drift, of=of, replica_checks=ReplicaChecks(3, "heal"))
    assert [rank.error for rank in ranks] == [None, None]
    [line] = logged_on(ranks)
    assert line.startswith(f"bucketddp: {NOT_EQUAL} after 5 synchronised backwards: `")
    assert line.endswith(FOLLOWS.format(0))
    assert_equal(ranks)


def test_drift_that_is_only_logged_goes_on() -> None:
    ranks = run_on_ranks(drift, of="weight", replica_checks=ReplicaChecks(3, "log"), max_steps=9)
    assert [rank.error for rank in ranks] == [None, None]
    after = [line.partition(":")[2].partition(":")[0] for line in logged_on(ranks)]
    assert after == [
        f" {NOT_EQUAL} after 5 synchronised backwards",
        f" {NOT_EQUAL} after 8 synchronised backwards",
        f" {NOT_EQUAL} at the end of training",
    ]
    assert not torch.equal(ranks[0].weights["layers.0.weight"], ranks[1].weights["layers.0.weight"])


@pytest.mark.parametrize(("on_rank", "source"), [(2, 0), (0, 1)])
def test_most_ranks_win(on_rank: int, source: int) -> None:
    options: dict[str, Any] = {"of": "moment", "on_rank": on_rank, "after_batch": 0}
    differs = f"`optimizer 0: exp_avg of layers.0.weight` on rank {on_rank} differs from that on the other ranks"
    for rank in run_on_ranks(drift, world_size=3, replica_checks=1, **options):
        assert rank.error is not None
        assert differs in rank.error
    ranks = run_on_ranks(drift, world_size=3, replica_checks=ReplicaChecks(1, "heal"), max_steps=5, **options)
    [line] = logged_on(ranks)
    assert differs in line
    assert line.endswith(FOLLOWS.format(source))
    assert_equal(ranks)


def test_what_a_majority_heals_equals_a_run_without_drift() -> None:
    """The state that is not used before it is healed: a flip in the last step."""
    healthy = run_on_ranks(drift, world_size=3, of="moment", on_rank=9, max_steps=3)
    ranks = run_on_ranks(drift, world_size=3, of="moment", on_rank=0, after_batch=2, max_steps=3, replica_checks=HEAL)
    [line] = logged_on(ranks)
    assert f"{NOT_EQUAL} at the end of training: `optimizer 0: exp_avg of layers.0.weight` on rank 0 differs" in line
    assert_equal([healthy[0], *ranks])


def test_drift_after_the_last_check_is_found_at_the_end() -> None:
    for rank in run_on_ranks(drift, of="weight", after_batch=6):
        assert rank.error is not None
        assert rank.error.startswith(f"ReplicaDivergedError: {NOT_EQUAL} at the end of training: `layers.0.weight`")


@pytest.mark.parametrize("every_n_steps", [None, 0])
def test_nothing_is_compared_without_a_checkpoint_if_the_user_says_so(every_n_steps: int | None) -> None:
    ranks = run_on_ranks(drift, of="weight", replica_checks=every_n_steps)
    assert [rank.error for rank in ranks] == [None, None]


def test_a_buffer_that_drifts_follows_rank_zero_from_the_next_step_on() -> None:
    ranks = run_on_ranks(drift, of="buffer", replica_checks=1, max_steps=5)
    assert [rank.error for rank in ranks] == [None, None]
    assert logged_on(ranks) == []
    assert_equal(ranks)
    assert torch.equal(ranks[1].weights["scale"], torch.ones(3))


def test_checks_ride_in_the_notes_of_the_steps() -> None:
    """Two gathers more in all: before the first step and at the end."""
    [without, _] = run_on_ranks(num_collectives, every_n_steps=None, max_steps=9)
    for every_n_steps in (1, 3):
        [with_checks, _] = run_on_ranks(num_collectives, every_n_steps=every_n_steps, max_steps=9)
        assert with_checks == {**without, "all_gather": without["all_gather"] + 2}


@for_each("on_divergence", ["raise", "heal", "log"])
def test_drift_in_a_bare_loop(on_divergence: str) -> None:
    expected = (
        "after 6 synchronised backwards: `optimizer 0: exp_avg_sq of 0.weight` differs between rank 0 and rank 1."
    )
    for error in run_on_ranks(replicas.flip_in_a_loop, on_divergence=on_divergence, on_rank=1):
        assert expected in error if on_divergence == "raise" else error == "no error"


# --- Checkpoints


@pytest.mark.parametrize("of", ["weight", "moment", "learning_rate"])
@pytest.mark.parametrize("on_divergence", ["raise", "heal", "log"])
@pytest.mark.sampled(4)
def test_diverged_replicas_are_not_written_silently(on_divergence: OnDivergence, of: str, tmp_path: Path) -> None:
    ranks = run_on_ranks(
        drift,
        of=of,
        after_batch=3,
        save_every=(tmp_path, 2),
        max_steps=4,
        replica_checks=ReplicaChecks(None, on_divergence),
    )
    path = tmp_path / "epoch=0-step=4.ckpt"
    text = f"{NOT_EQUAL} before checkpoint `{path}` is written: `"
    if on_divergence == "raise":
        assert all(rank.error is not None and text in rank.error for rank in ranks)
        assert [file.name for file in tmp_path.iterdir()] == ["epoch=0-step=2.ckpt"]
        return
    assert [rank.error for rank in ranks] == [None, None]
    [line] = logged_on(ranks)
    assert text in line
    assert path.exists()
    if on_divergence == "heal":
        assert_equal(ranks)


def test_a_checkpoint_holds_what_most_ranks_hold(tmp_path: Path) -> None:
    """Rank 0 writes it, and is the one that is healed."""
    for of in ("weight", "moment", "learning_rate"):
        ranks = run_on_ranks(
            drift,
            world_size=3,
            of=of,
            on_rank=0,
            after_batch=2,
            save_every=(tmp_path / of, 3),
            max_steps=3,
            replica_checks=HEAL,
        )
        saved = torch.load(tmp_path / of / "epoch=0-step=3.ckpt", weights_only=False)
        torch.testing.assert_close(saved["state_dict"], ranks[1].weights, rtol=0, atol=0)
        torch.testing.assert_close(saved["optimizer_states"], [ranks[1].optimizer], rtol=0, atol=0)
        assert_equal(ranks)


def test_what_exists_on_one_rank_only_cannot_be_healed(tmp_path: Path) -> None:
    for rank in run_on_ranks(
        drift, of="state", after_batch=1, save_every=(tmp_path, 2), max_steps=2, replica_checks=HEAL
    ):
        assert rank.error is not None
        assert "`optimizer 0: exp_avg of layers.0.weight` exists on rank 0 but not on rank 1." in rank.error
        assert rank.error.endswith("so none can follow another: make their optimizers the same.")
    assert list(tmp_path.iterdir()) == []


def test_the_error_itself_leaves_no_checkpoint(tmp_path: Path) -> None:
    ranks = run_on_ranks(drift, of="weight", save_on_exception=tmp_path, replica_checks=3)
    assert all(rank.error is not None and rank.error.startswith("ReplicaDivergedError: ") for rank in ranks)
    assert not list(tmp_path.rglob("*.ckpt"))


# --- From the start, and sets that change on one rank


@pytest.mark.parametrize(
    ("of", "text"),
    [
        ("learning_rate", "`optimizer 0: lr of group 0` is 0.01 on rank 0 but 0.02 on rank 1. "),
        ("groups", "`optimizer 0: group of layers.0.bias` is 1 on rank 0 but 0 on rank 1; "),
        ("weights", "`layers.0.weight` differs between rank 0 and rank 1; "),
    ],
)
def test_other_optimizers_or_weights_are_refused_before_the_first_step(of: str, text: str) -> None:
    for error, num_steps in run_on_ranks(refusal, of=of):
        assert error.startswith(f"ReplicaDivergedError: {NOT_EQUAL} before the first step: {text}")
        assert num_steps == 0


def test_modules_are_compared_without_init_sync() -> None:
    for error, num_steps in run_on_ranks(other_shape_without_init_sync):
        assert error.startswith("ReplicaMismatchError: `scale` has shape [4] on rank 0 but [3] on rank 1.")
        assert num_steps == 0


@for_each("is_known", [True, False])
@for_each("overlap", [True, False])
def test_a_layer_that_one_rank_freezes_is_named(is_known: bool, overlap: bool) -> None:
    errors = run_on_ranks(replicas.freeze_on_one_rank_in_mid_training, is_known=is_known, overlap=overlap)
    text = "step 4: `0.weight` has requires_grad True on rank 0 but False on rank 1."
    assert all(error.startswith(text) for error in errors), errors


def test_a_fit_in_which_one_rank_freezes_a_layer_ends_in_that_step() -> None:
    for error, num_steps in run_on_ranks(freeze_on_one_rank):
        assert error.startswith(FROZEN)
        assert num_steps == 3


# --- Nothing to report


@pytest.mark.parametrize("training", list(HEALTHY))
@pytest.mark.sampled(4)
def test_what_differs_by_design_is_no_drift(training: str, tmp_path: Path) -> None:
    ranks = run_on_ranks(train_healthy, training=training, directory=tmp_path)
    assert ranks == [([], HEALTHY[training].is_checked)] * 2


# --- Fabric


@pytest.mark.parametrize("of", ["weight", "moment"])
@pytest.mark.parametrize("every_n_steps", [2, None])
@pytest.mark.parametrize("on_divergence", ["raise", "heal", "log"])
@pytest.mark.sampled(5)
def test_fabric_compares_too(on_divergence: OnDivergence, every_n_steps: int | None, of: str, tmp_path: Path) -> None:
    ranks = run_on_ranks(
        drift_in_fabric,
        of=of,
        directory=tmp_path,
        replica_checks=ReplicaChecks(every_n_steps, on_divergence),
    )
    when = f"before checkpoint `{tmp_path}/model.ckpt` is written" if every_n_steps is None else "after 6 synchronised"
    name = "`optimizer 0: exp_avg of 0.weight`" if of == "moment" else "`0.weight`"
    assert [is_written for _, _, is_written in ranks] == [on_divergence != "raise"] * 2
    (error, lines, _), (other_error, other_lines, _) = ranks
    assert error == other_error
    assert other_lines == []
    said = [error] if on_divergence == "raise" else lines
    assert f"{NOT_EQUAL} {when}" in said[0]
    assert name in said[0]
    # Healed once, or found again by each check and before the checkpoint.
    assert len(said) == (3 if on_divergence == "log" and every_n_steps else 1)


def test_ranks_may_accumulate_differently_in_fabric() -> None:
    assert run_on_ranks(accumulate_differently_in_fabric) == [[], []]


# --- Options


@for_each("strategy", [BucketDDPStrategy, FabricStrategy])
def test_options_are_checked(strategy: Any) -> None:
    for number in (-1, 1.5, True, "often"):
        with pytest.raises(ValueError, match="`replica_checks` must be a number of steps, or None"):
            strategy(replica_checks=number)
    assert strategy(replica_checks=5).options.replica_checks == ReplicaChecks(5)
    with pytest.raises(ValueError, match="`on_divergence` must be one of `raise`, `heal`, `log`, got 'ignore'"):
        ReplicaChecks(on_divergence="ignore")  # type: ignore[arg-type]
