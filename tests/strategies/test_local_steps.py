"""Steps that islands take without the others: the same numbers as DiLoCo's, and fewer bytes between them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks

from lightning_bucketddp.config import IslandsOption, LocalSteps
from lightning_bucketddp.recording.reader import read_run
from tests.support.doomed_ranks import doomed_ranks
from tests.support.ranks import run_on_ranks
from tests.support.scripts.faults import Fault, fit
from tests.support.scripts.local_steps import (
    PLAIN,
    average_exponentially,
    corrupt,
    refusals,
    save_and_resume,
    spoil,
    train,
    train_unevenly,
)


def test_a_round_of_one_plain_step_equals_ddp_bit_for_bit() -> None:
    ours = run_on_ranks(train, model="dyadic", local_steps=LocalSteps(1, "rank", **PLAIN))
    ddp = run_on_ranks(train, model="dyadic", strategy="ddp")
    assert len(ddp[0]["after_batches"]) == 4
    assert [rank["after_batches"] for rank in ours] == [ddp[0]["after_batches"]] * 2


@pytest.mark.parametrize(("world_size", "islands"), [(2, "rank"), pytest.param(4, 2, marks=pytest.mark.long)])
def test_a_round_of_one_plain_step_nearly_equals_ddp_where_numbers_are_rounded(
    world_size: int, islands: IslandsOption
) -> None:
    # On four ranks gradients are averaged inside of two islands, and weights between them.
    ours = run_on_ranks(train, world_size=world_size, model="rounded", local_steps=LocalSteps(1, islands, **PLAIN))
    ddp = run_on_ranks(train, world_size=world_size, model="rounded", strategy="ddp")
    for rank in ours:
        assert rank["final"] == ours[0]["final"]
        for name, weights in ddp[0]["final"].items():
            torch.testing.assert_close(torch.tensor(rank["final"][name]), torch.tensor(weights), rtol=2e-6, atol=2e-7)


def test_islands_exchange_nothing_between_outer_steps_and_then_each_weight_once() -> None:
    ranks = run_on_ranks(train, local_steps=LocalSteps(5, "rank"))
    for rank in ranks:
        talkative = [batch for batch, calls in enumerate(rank["calls"][:10]) if calls]
        assert talkative == [0, 4, 9]  # the first has what the fit begins with
        # One all-reduce of all parameters in an outer step; the rest are buffers and a message.
        assert all(max(rank["calls"][batch]) == rank["num_bytes"] for batch in (4, 9))
        assert rank["num_outer_steps"] == 2
        assert rank["outer_bytes"] / 10 == rank["num_bytes"] / 5
    first, second = (rank["after_batches"] for rank in ranks)
    assert [batch for batch in range(10) if first[batch] == second[batch]] == [4, 9]
    assert ranks[0]["learning_rates"] == ranks[1]["learning_rates"]
    assert len(set(ranks[0]["learning_rates"])) == 4


@pytest.mark.parametrize(("reduce_dtype", "fraction"), [("bf16", 0.5), ("int8", 0.3)])
def test_changes_travel_as_gradients_would(reduce_dtype: str, fraction: float) -> None:
    ranks = run_on_ranks(train, model="wide", local_steps=LocalSteps(5, "rank"), reduce_dtype=reduce_dtype)
    assert ranks[0]["final"] == ranks[1]["final"]
    assert ranks[0]["outer_bytes"] <= fraction * ranks[0]["num_bytes"] * 2


def test_an_island_of_two_ranks_averages_in_each_step_and_halves_what_each_rank_exchanges(tmp_path: Path) -> None:
    ranks = run_on_ranks(train, world_size=4, local_steps=LocalSteps(2, 2), directory=tmp_path)
    weights = [rank["after_batches"] for rank in ranks]
    assert weights[0] == weights[1] != weights[2] == weights[3]
    assert [batch for batch in range(5) if weights[0][batch] == weights[2][batch]] == [1, 3]
    assert len({str(rank["at_epoch_end"]) for rank in ranks}) == 1
    for rank in ranks:
        assert rank["num_outer_steps"] == 3
        assert 0.5 * rank["num_bytes"] <= rank["outer_bytes"] / 3 < 0.52 * rank["num_bytes"]
    for rank, record in read_run(tmp_path / "bucketddp").ranks.items():
        assert [outer.step for outer in record.outer_steps] == [2, 4, 5]
        assert sum(outer.num_bytes for outer in record.outer_steps) == ranks[rank]["outer_bytes"]
        assert record.run.options["num_islands"] == 2


@pytest.mark.long
def test_batchnorm_is_synchronized_inside_of_an_island_only() -> None:
    synced, apart = (
        run_on_ranks(train, world_size=4, local_steps=LocalSteps(2, 2), sync_batchnorm=is_on) for is_on in (True, False)
    )
    assert len({str(rank["final"]) for rank in synced}) == 1
    # In the first step the statistics make a difference, and nothing has been exchanged between islands.
    assert synced[0]["after_batches"][0] != apart[0]["after_batches"][0]
    assert synced[0]["after_batches"][0] == synced[1]["after_batches"][0] != synced[2]["after_batches"][0]


def test_layers_that_are_frozen_at_first_are_exchanged_once_they_are_trained() -> None:
    first, second = (
        rank["after_batches"] for rank in run_on_ranks(train, thaws=True, local_steps=LocalSteps(4, "rank"))
    )
    assert [batch for batch in range(20) if first[batch] == second[batch]] == [3, 7, 13, 17]
    assert first[9]["layers.0.weight"] == first[0]["layers.0.weight"]
    assert first[19]["layers.0.weight"] != first[13]["layers.0.weight"] != first[0]["layers.0.weight"]


def test_a_validation_sees_the_same_weights_on_all_ranks() -> None:
    ranks = run_on_ranks(train, local_steps=LocalSteps(4, "rank"), val_check_interval=3)
    assert len(ranks[0]["at_validation"]) == 3
    assert ranks[0]["at_validation"] == ranks[1]["at_validation"]
    assert ranks[0]["at_epoch_end"] == ranks[1]["at_epoch_end"]


def test_a_run_that_is_resumed_ends_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    options: dict[str, Any] = {"path": path, "local_steps": LocalSteps(4, "rank"), "with_scaler": True}
    whole = run_on_ranks(save_and_resume, resume=False, **options)
    resumed = run_on_ranks(save_and_resume, resume=True, **options)
    assert resumed[0]["moments"] != resumed[1]["moments"]
    for before, after in zip(whole, resumed, strict=True):
        assert (after["final"], after["scale"]) == (whole[0]["final"], before["scale"])
    # The scales differ, because each has counted its own steps.
    assert whole[0]["scale"] != whole[1]["scale"]

    # In other divisions: states are dealt out in turn. And without: those of the first island.
    four = run_on_ranks(save_and_resume, world_size=4, path=path, resume=True, local_steps=LocalSteps(4, "rank"))
    assert [rank["moments"] for rank in four] == [resumed[r % 2]["moments"] for r in range(4)]
    for strategy in ("ddp", "bucketddp"):
        plain = run_on_ranks(save_and_resume, path=path, resume=True, strategy=strategy)
        assert [rank["moments"] for rank in plain] == [resumed[0]["moments"]] * 2
    run_on_ranks(save_and_resume, path=path, resume=False, strategy="ddp")
    from_ddp = run_on_ranks(save_and_resume, path=path, resume=True, local_steps=LocalSteps(4, "rank"))
    assert from_ddp[0]["moments"] == from_ddp[1]["moments"]
    assert from_ddp[0]["final"] == from_ddp[1]["final"]


def test_weights_that_are_not_finite_are_named_and_left_out() -> None:
    raised = run_on_ranks(spoil, on_nonfinite="raise")
    for rank in raised:
        assert rank["messages"][-1].startswith(
            "NonFiniteError: Not finite after the local steps before step 6: the weights `layers.3.bias` on rank 1. All"
        )
    skipped = run_on_ranks(spoil, on_nonfinite="skip")
    assert skipped[0]["final"] == skipped[1]["final"]
    assert all(torch.tensor(weight).isfinite().all() for weight in skipped[0]["final"].values())
    told = [message for message in skipped[0]["messages"] if "the weights" in message]
    assert len(told) == 1
    assert told[0].endswith("on rank 1. They are left out, and those ranks go on with the weights of the others.")


def test_global_weights_that_differ_between_islands_are_noticed_after_an_outer_step() -> None:
    for text in run_on_ranks(corrupt):
        assert text.startswith(
            "ReplicaDivergedError: The replicas are not equal after 2 outer steps: `layers.0.weight`"
        )
        assert "differs between rank 0 and rank 1" in text


@pytest.mark.parametrize("kind", ["sized", pytest.param("stream", marks=pytest.mark.long)])
def test_islands_that_run_out_of_data_at_different_times_wait_for_the_others(kind: str) -> None:
    options: dict[str, Any] = {"kind": kind, "local_steps": LocalSteps(2, "rank")}
    ranks = run_on_ranks(train_unevenly, num_batches=[3, 8], uneven_data=True, **options)
    assert [ranks[0][key] for key in ("final", "steps", "at_epoch_end")] == [
        ranks[1]["final"],
        16,
        ranks[1]["at_epoch_end"],
    ]
    # An island without data takes no step of its own.
    has_moved = [rank["after_batches"][4] != rank["after_batches"][3] for rank in ranks]
    assert has_moved == [False, True]
    for rank in run_on_ranks(train_unevenly, num_batches=[3, 8], uneven_data=False, **options):
        assert rank["error"].startswith(
            "OutOfStepError: Rank 0 has no more data in epoch 0, while rank 1 goes on after"
        )


@pytest.mark.long
def test_ranks_of_an_island_that_run_out_of_data_go_on_with_it() -> None:
    options: dict[str, Any] = {"kind": "stream", "local_steps": LocalSteps(2, 2)}
    ranks = run_on_ranks(train_unevenly, world_size=4, num_batches=[2, 5, 8, 3], uneven_data=True, **options)
    assert len({str(rank["final"]) for rank in ranks}) == 1
    assert {rank["steps"] for rank in ranks} == {16}


def test_a_teacher_that_is_updated_and_not_trained_is_that_of_the_mean_of_all_islands() -> None:
    first, second = run_on_ranks(train, model="taught", local_steps=LocalSteps(4, "rank"), replica_checks=1)
    ours, theirs = first["after_batches"], second["after_batches"]
    assert [batch for batch in range(10) if ours[batch] == theirs[batch]] == [3, 7]
    assert first["final"] == second["final"]
    # Neither is anything sent that has not changed.
    assert max(num_bytes for calls in first["calls"][1:] for num_bytes in calls) < 4 * 1000

    ours, *_ = run_on_ranks(train, model="taught", local_steps=LocalSteps(1, "rank", **PLAIN))
    ddp, *_ = run_on_ranks(train, model="taught", strategy="ddp")
    for name, weight in ddp["final"].items():
        torch.testing.assert_close(torch.tensor(ours["final"][name]), torch.tensor(weight))


@pytest.mark.skipif(not hasattr(callbacks, "EMAWeightAveraging"), reason="of Lightning 2.6")
def test_a_moving_average_is_that_of_the_mean_of_all_islands() -> None:
    ranks = run_on_ranks(average_exponentially)
    assert ranks[0]["averaged"] == ranks[1]["averaged"]
    for averaged, expected in zip(ranks[0]["averaged"], ranks[0]["expected"], strict=True):
        torch.testing.assert_close(torch.tensor(averaged), torch.tensor(expected))


@pytest.mark.long
def test_a_signal_ends_the_round_on_all_ranks(tmp_path: Path) -> None:
    fault = Fault("SIGTERM", rank=1)
    with doomed_ranks(
        fit, directory=tmp_path, fault=fault, local_steps=LocalSteps(10**6, "rank"), pause_after_s=0.1
    ) as ranks:
        ended = ranks.wait()
    assert ended.exit_codes == [143, 143], ended.output
    seen = [ended.results[f"seen{rank}"] for rank in (0, 1)]
    assert all(one["has_group"] for one in seen)
    assert seen[0]["weights"] == seen[1]["weights"]
    checkpoint = torch.load(tmp_path / "on_exception" / "on_exception.ckpt", weights_only=True)
    assert len(checkpoint["bucketddp"]["local_steps"]["other_islands"]) == 1


@pytest.mark.long
def test_a_rank_that_dies_in_a_round_is_named_by_the_other_island(tmp_path: Path) -> None:
    fault = Fault("SIGKILL", rank=1)
    with doomed_ranks(
        fit, directory=tmp_path, fault=fault, local_steps=LocalSteps(10**6, "rank"), pause_after_s=0.1
    ) as ranks:
        ended = ranks.wait()
    assert ended.exit_codes[1] == -signal.SIGKILL
    assert ended.results["seen0"]["type"] == "RankFailedError"
    assert "Rank 1" in ended.results["seen0"]["message"]
    # What rank 0 had is saved as it is.
    checkpoint = torch.load(tmp_path / "on_exception" / "on_exception.ckpt", weights_only=True)
    assert checkpoint["global_step"] == ended.results["seen0"]["step"]


@pytest.mark.long
def test_what_a_rank_leaves_that_dies_in_an_outer_step_is_not_saved(tmp_path: Path) -> None:
    fault = Fault("SIGKILL", "outer step", rank=1)
    with doomed_ranks(fit, directory=tmp_path, fault=fault, local_steps=LocalSteps(4, "rank")) as ranks:
        ended = ranks.wait()
    assert ended.results["seen0"]["type"] == "RankFailedError"
    assert "Rank 1" in ended.results["seen0"]["message"]
    assert "is not saved, because a rank was lost" in ended.output[0], ended.output[0]
    assert not list(tmp_path.rglob("*.ckpt"))


def test_what_cannot_be_had_is_refused_before_the_first_step() -> None:
    cases: list[dict[str, Any]] = [
        {"local_steps": LocalSteps(2, 3)},
        {"local_steps": LocalSteps(2, "rank"), "sync_batchnorm": True},
        {"local_steps": LocalSteps(2, "rank"), "by_hand": True},
        {"local_steps": 2},
    ]
    answers = run_on_ranks(refusals, cases=cases)[0]
    for answer, text in zip(
        answers,
        [
            "`islands=3` cannot divide 2 ranks into islands of equal size. Pass a number that divides 2: 2; or 'host'",
            "`sync_batchnorm=True` needs other ranks in each step, but with `local_steps` each rank is alone in its",
            "`layers.1` (SyncBatchNorm) talks to ranks of other islands in each step, which `local_steps` is to avoid.",
            "bucketddp: `local_steps=2` has no effect, because all ranks are in one island (`islands='host'`):",
        ],
        strict=True,
    ):
        assert answer.startswith(text)
