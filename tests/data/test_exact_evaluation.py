"""Validation, test and prediction on several ranks see every sample once, and log what one process logs."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cases import for_each
from tests.support.programs import SCRIPTS, run
from tests.support.ranks import run_on_ranks
from tests.support.scripts.evaluations import (
    Case,
    evaluate,
    evaluate_with_fabric,
    mean_of_integers,
    memory_of_gathering,
    predict,
)

CASES = {
    "more batches on some ranks": Case((103,)),
    "one sample more than full batches": Case((9,), batch_size=4),
    "as many on all ranks": Case((24,)),
    "fewer batches than ranks": Case((6,), batch_size=64),
    "shuffled": Case((21,), shuffle=True),
    "drawn by the user's sampler": Case((41,), kind="subset"),
    "the user's batches": Case((17,), kind="custom batches", batch_size=3),
    "two loaders": Case((20, 9)),
    "two loaders at once, the longer one is uneven": Case((23, 12), mode="max_size"),
    "one sample": Case((1,)),
    "fewer samples than ranks": Case((3,), batch_size=2),
    "batches of one": Case((7,), batch_size=1),
    "no batches": Case((10,), batch_size=None),
    "two loaders, one sample in the second": Case((9, 1)),
}


@functools.cache
def alone(name: str) -> dict[str, Any]:
    [outcome] = run_on_ranks(evaluate, world_size=1, cases=[CASES[name]])[0]
    return outcome


def assert_logged_as_alone(outcome: dict[str, Any], expected: dict[str, Any], world_size: int) -> None:
    assert outcome["logged"].keys() == expected["logged"].keys()
    # Sums of whole numbers are exact, and halves and quarters of them.
    for name, value in expected["logged"].items():
        if world_size in (2, 4) and not name.startswith(("accuracy", "auroc")):
            assert outcome["logged"][name] == value, name
        else:
            assert outcome["logged"][name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize("world_size", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))])
def test_every_sample_counts_once(world_size: int) -> None:
    ranks = run_on_ranks(evaluate, world_size=world_size, cases=list(CASES.values()))
    for number, (name, case) in enumerate(CASES.items()):
        outcomes = [rank[number] for rank in ranks]
        assert len({outcome["num_steps"] for outcome in outcomes}) == 1, name
        for outcome in outcomes:
            assert_logged_as_alone(outcome, alone(name), world_size)
        seen = {index for outcome in outcomes for batch in outcome["seen"] for index in batch}
        assert seen == {index for batch in alone(name)["seen"] for index in batch}, name
        assert all(len(batch) <= (case.batch_size or 1) for outcome in outcomes for batch in outcome["seen"])
        if case.kind != "custom batches":
            sizes = [[len(batch) for batch in outcome["seen"]] for outcome in outcomes]
            assert all(of_rank == sizes[0] for of_rank in sizes), name


@for_each("mode", ["min_size", "max_size", "max_size_cycle"])
def test_loaders_that_are_combined_take_as_many_steps_on_all_ranks(mode: Any) -> None:
    ranks = [outcome for [outcome] in run_on_ranks(evaluate, cases=[Case((21, 10), mode=mode)])]
    # 9 samples of the first loader on both ranks, and 3 more on one; 5 and 5 of the second.
    assert [outcome["num_steps"] for outcome in ranks] == ([2, 2] if mode == "min_size" else [4, 4])
    sizes = [[len(batch) for batch in outcome["seen"]] for outcome in ranks]
    together = {"min_size": [4, 4, 4, 1], "max_size": [4, 4, 4, 1, 1, 3], "max_size_cycle": [4, 4, 4, 1, 1, 4, 3, 1]}
    assert sizes == [together[mode]] * 2
    assert ranks[0]["logged"] == ranks[1]["logged"]


def test_last_batches_that_are_not_full_are_dropped() -> None:
    ranks = run_on_ranks(evaluate, cases=[Case((21,), drop_last=True), Case((7,), drop_last=True)])
    # Five and one full batches, of which the last is repeated.
    seen = [[outcome["seen"] for outcome in rank] for rank in ranks]
    batches = [list(range(start, start + 4)) for start in range(0, 20, 4)]
    assert seen == [[batches[0::2], batches[:1]], [[*batches[1::2], batches[4]], batches[:1]]]
    [alone] = run_on_ranks(evaluate, world_size=1, cases=[Case((21,), drop_last=True)])
    for rank in ranks:
        assert_logged_as_alone(rank[0], alone[0], world_size=2)


@pytest.mark.parametrize(
    ("trainer", "num_batches", "num_asked"),
    [
        ({}, [5], 1),
        ({"limit_val_batches": 3}, [3], 1),
        ({"limit_val_batches": 0.5}, [2], 1),
        ({"overfit_batches": 2}, [2], 1),
        ({"num_sanity_val_steps": 1}, [1, 5], 1),
        ({"max_epochs": 3, "reload_dataloaders_every_n_epochs": 2}, [5, 5, 5], 2),
    ],
    ids=str,
)
@pytest.mark.sampled(3)
def test_validation_in_a_fit(trainer: dict[str, Any], num_batches: list[int], num_asked: int) -> None:
    ranks = [outcome for [outcome] in run_on_ranks(evaluate, cases=[Case((31,), trainer=trainer)], stage="fit")]
    for rank, outcome in enumerate(ranks):
        share = list(range(rank, 28, 2))
        batches = [*(share[at : at + 4] for at in range(0, len(share), 4)), [28, 29, 30]]
        assert outcome["seen"] == [batch for num in num_batches for batch in batches[:num]]
        assert outcome["num_asked"] == num_asked
    assert ranks[0]["logged"] == ranks[1]["logged"]


def test_a_mean_of_integers_is_not_cut_off_and_leaves_them_as_they_are() -> None:
    assert run_on_ranks(mean_of_integers) == [(1.5, 1), (1.5, 2)]


def test_test_is_as_exact_as_validation() -> None:
    case = CASES["more batches on some ranks"]
    for [outcome] in run_on_ranks(evaluate, cases=[case], stage="test"):
        assert_logged_as_alone(outcome, alone("more batches on some ranks"), world_size=2)


def test_what_lightning_leaves_alone_is_left_alone() -> None:
    untouched = Case((5,), trainer={"use_distributed_sampler": False})
    ranks = run_on_ranks(evaluate, cases=[untouched, Case((5,), kind="stream"), Case((5,), kind="distributed")])
    for rank, [all_samples, stream, of_user] in enumerate(ranks):
        assert all_samples["seen"] == stream["seen"] == [[0, 1, 2, 3], [4]]
        assert of_user["seen"] == [[[0, 2, 4], [1, 3, 0]][rank]]


def test_samples_are_repeated_as_ddp_does_if_asked() -> None:
    ranks = [outcome for [outcome] in run_on_ranks(evaluate, cases=[Case((5,), exact=False)])]
    assert [outcome["seen"] for outcome in ranks] == [[[0, 2, 4]], [[1, 3, 0]]]


@for_each("options", [{}, {"shuffle": True}, {"kind": "custom batches"}, {"batch_size": None}])
def test_fabric_evaluates_every_sample_once(options: dict[str, Any]) -> None:
    num_samples = [1, 9, 10, 31]
    ranks = run_on_ranks(evaluate_with_fabric, num_samples=num_samples, **options)
    for number, *batches in zip(num_samples, *ranks, strict=True):
        samples = itertools.chain.from_iterable
        assert sorted(samples(samples(batches))) == list(range(number))
        if number > 1 and "batch_size" not in options and "kind" not in options:  # there is something to split
            assert len(batches[0]) == len(batches[1])


# --- predictions

PREDICTED = {
    "more batches on some ranks": Case((23,)),
    "fewer batches than ranks": Case((3,)),
    "the user's batches": Case((13,), kind="custom batches", batch_size=3),
    "two loaders": Case((9, 4), batch_size=2),
}


def batches_in(outcome: dict[str, Any], case: Case) -> list[dict[str, Any]]:
    by_loader = [outcome["returned"]] if len(case.num_samples) == 1 else outcome["returned"]
    return list(itertools.chain.from_iterable(by_loader))


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: part.tolist() if isinstance(part, torch.Tensor) else part for name, part in batch.items()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_predictions_of_all_ranks_are_those_of_one_process(world_size: int) -> None:
    cases = list(PREDICTED.values())
    [expected] = run_on_ranks(predict, world_size=1, cases=cases)
    ranks = run_on_ranks(predict, world_size=world_size, cases=cases, gather_predictions=True)
    for case, alone, *outcomes in zip(cases, expected, *ranks, strict=True):
        returned = batches_in(outcomes[0], case)
        assert [plain(batch) for batch in returned] == [plain(batch) for batch in batches_in(alone, case)]
        # What another rank has made a view of a larger tensor comes alone.
        assert {batch["view"].untyped_storage().nbytes() == batch["view"].nbytes for batch in returned[1:2]} <= {True}
        for kind in ("by_batch", "by_epoch"):
            assert sorted(sample for outcome in outcomes for sample in outcome[kind]) == sorted(alone[kind])


def test_a_limit_of_predicted_batches_is_one_of_each_rank() -> None:
    [limited], _ = run_on_ranks(
        predict, cases=[Case((40,), trainer={"limit_predict_batches": 2})], gather_predictions=True
    )
    assert [name for batch in limited["returned"] for name in batch["names"]] == [f"sample {i}" for i in range(16)]


def test_predictions_stay_where_they_are_made_by_default() -> None:
    cases = [Case((5,), batch_size=2), Case((1,))]
    ranks = run_on_ranks(predict, cases=cases)
    assert [sorted(index for rank in ranks for index, _ in rank[number]["by_batch"]) for number in (0, 1)] == [
        list(range(5)),
        [0],
    ]
    assert [[len(batch["value"]) for batch in rank[0]["returned"]] for rank in ranks] == [[2, 1], [2]]


def test_rank_zero_needs_memory_for_the_result_and_little_more() -> None:
    num_bytes, num_batches = 4 * 2**20, 32
    (needed, received), _ = run_on_ranks(memory_of_gathering, num_batches=num_batches, num_bytes=num_bytes)
    assert received == num_batches * num_bytes
    # To hold all batches as they travel, beside what they become, would take twice as much.
    assert received <= needed < 1.6 * received


@pytest.mark.parametrize("launcher", ["popen", "fork", "spawn", "torchrun"])
@pytest.mark.sampled(1)
def test_every_launcher(launcher: str, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command: list[str | Path] = [*(torchrun if launcher == "torchrun" else []), SCRIPTS / "evaluate.py", launcher]
    root = "pytorch_lightning" if launcher in ("spawn", "torchrun") else "lightning.pytorch"
    finished = run(*command, root=root, directory=tmp_path)
    assert finished.returncode == 0, finished.output
    in_order = [[2.0 * number for number in range(at, min(at + 4, 103))] for at in range(0, 103, 4)]
    assert finished.results["predict"] == in_order
    mean = sum(i * i % 97 for i in range(103)) / 103
    assert finished.results["test"] == [pytest.approx({"mean": mean, "count": 103})]
    assert finished.results["steps"] == [14, 14]
    assert "it is recommended to use `Trainer(devices=1" not in finished.output
