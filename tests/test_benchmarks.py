"""The benchmarks run, and say what they have measured. What they measure is in `benchmarks/results`."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from benchmarks import (
    gpu_suite,
    growth,
    host_overhead,
    memory,
    monitor_overhead,
    overlap,
    quality,
    startup,
    step_time,
    wires,
)
from benchmarks.loop import LoopSettings
from benchmarks.own_processes import OwnProcesses, without_failed
from benchmarks.peaks import Peaks
from benchmarks.quality_results import Result, markdown
from benchmarks.quality_training import DDP, PLAIN, Run, Trained, local, train
from benchmarks.ranks import Place, RankFailed, Ranks
from benchmarks.report import table_of
from benchmarks.turns import take_turns
from benchmarks.variants import (
    ALONE,
    ddp_variants,
    settling_in,
    sharded_variants,
)
from tests.support import warm
from tests.support.ranks import on_ranks, run_on_ranks


class Failing:
    """Fails on rank 1 while rank 0 waits for it."""

    def __init__(self, settings: None, device: torch.device) -> None:
        pass

    def fail(self) -> None:
        if dist.get_rank() == 1:
            raise ValueError("this rank failed")
        dist.barrier()


def trainings(runs: list[Run]) -> list[Trained]:
    """What this rank has at the end of each of `runs`, each rank a node as in `benchmarks.ranks`."""
    with patch.dict(os.environ, NODE_RANK=str(dist.get_rank()), LOCAL_RANK="0"):
        return [train(run) for run in runs]


Capture = pytest.CaptureFixture[str]
OURS = "bucketddp"
THEIRS = [variant.name for variant in ddp_variants()]
SMALL = "--model gpt2_shapes --settle 2 --repetitions 1"
PNG = b"\x89PNG\r\n"
COMMANDS: dict[str, tuple[Callable[..., Any], str]] = {
    "step_time": (step_time.main, f"{SMALL} --steps=1 --unused=changing"),
    "step_time, caps": (step_time.main, f"{SMALL} --steps=1 --ranks=1 --wire=bf16 --bucket-cap-mb 1 2.5 --no-check"),
    "step_time, trainer": (step_time.main, f"{SMALL} --steps=1 --through=trainer --accumulate=2"),
    "wires": (wires.main, f"{SMALL} --steps=1"),
    "overlap": (overlap.main, f"{SMALL} --steps=1"),
    "memory": (memory.main, "--model gpt2_shapes --settle 2 --ranks=1"),
    "monitor_overhead": (monitor_overhead.main, f"{SMALL} --steps=2"),
    "startup": (startup.main, "--repetitions 1"),
    "host_overhead": (host_overhead.main, "--model=gpt2_shapes --repetitions 1"),
    "growth": (growth.main, "--repetitions 1 --exchange 2 5 --set-up 3 --watch=0.5"),
}


@pytest.fixture
def warm_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ranks and programs of benchmarks start in a moment."""
    python = warm.python()
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setattr(startup, "PROGRAM", [python, *startup.PROGRAM[1:]])


@pytest.mark.long
@pytest.mark.usefixtures("warm_programs")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_prints_and_writes_all_variants(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(memory, "ddp_variants", lambda: ddp_variants()[:1])  # each is profiled six times
    main, arguments = COMMANDS[name]
    plot = ["--png", str(tmp_path / "found.png")] if name == "overlap" else []
    main([*arguments.split(), *plot, "--json", str(tmp_path / "found.json")])
    assert not plot or (tmp_path / "found.png").read_bytes().startswith(PNG)
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {row for table in found["tables"] for row in table["rows"]}
    assert rows
    assert not {"step_time", "step_time, trainer", "overlap"} & {name} or rows >= {ALONE.name, OURS, "ddp"}
    assert f"torch {torch.__version__}" in found["about"]
    printed = capsys.readouterr().out
    for table in found["tables"]:
        assert table["title"] in printed
        assert all(len(row) == len(table["columns"]) for row in table["rows"].values())
        assert name in ("memory", "growth") or set(table["samples"]) >= set(table["rows"])


@pytest.mark.long
@pytest.mark.usefixtures("warm_programs")
def test_the_suite_goes_on_after_a_part_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(stage: Any, title: str, seconds: float) -> Any:
        raise RuntimeError("this part failed")

    kinds = {part.name: part for part in reversed(gpu_suite.PARTS)}  # the first of each
    parts = [gpu_suite.Part("fails", "fails", 1, fail), *(kinds[name] for name in ("trainer", "unused", "hooks"))]
    monkeypatch.setattr(gpu_suite.Stage, "start", lambda self: None)  # each group when it is needed
    monkeypatch.setattr(gpu_suite, "PARTS", parts)
    assert gpu_suite.main(["--device=cpu", "--seconds=1", f"--out={tmp_path}"]) == 1
    found = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert list(found["missing"]) == ["fails"]
    assert "this part failed" in found["missing"]["fails"]
    assert len(found["tables"]) == 7
    assert list(found["tables"][0]["rows"]) == [ALONE.name, OURS, *THEIRS]
    assert all(table["title"] in (tmp_path / "gpu_suite.txt").read_text() for table in found["tables"])


@pytest.mark.usefixtures("warm_programs")
def test_a_variant_that_fails_in_its_own_processes_is_left_out(capsys: Capture) -> None:
    failing = next(variant for variant in sharded_variants() if variant.kind == "fsdp")  # which needs a GPU
    settings = LoopSettings("tiny_layers", (replace(ALONE, steps_to_settle=2), failing), steps=2)
    with OwnProcesses(settings, {"here": Place(num_ranks=1)}) as fits:
        seconds = fits.first_steps()
        rounds = take_turns(fits.turns("here"), repetitions=2)
    assert seconds["here", ALONE.name] > 0
    assert math.isnan(seconds["here", failing.name])
    assert re.search(r"SHARD_GRAD_OP.*: Rank 0 failed in `turn`:(.|\n)*requires a GPU", capsys.readouterr().out)
    assert list(without_failed(rounds)) == [ALONE.name]
    assert all(turn.seconds > 0 for turn in without_failed(rounds)[ALONE.name])


@pytest.mark.long
@on_ranks()
def test_buckets_that_are_kept_between_steps_are_told_apart_from_gradients() -> None:
    variants = tuple(settling_in(2, [ALONE, ddp_variants()[0]]))
    peaks = Peaks(LoopSettings("gpt2_shapes", variants), torch.device("cpu"))
    alone, ddp = (peaks.memory(variant.name, 1) for variant in variants)
    num_bytes = peaks.gradient_bytes()
    assert alone.kept / num_bytes == pytest.approx(1, abs=0.05)  # its weights
    assert (ddp.kept - alone.kept) / num_bytes == pytest.approx(1, abs=0.05)
    assert (ddp.peak - alone.peak) / num_bytes == pytest.approx(1, abs=0.05)


@pytest.mark.usefixtures("warm_programs")
def test_a_rank_that_fails_ends_the_benchmark() -> None:
    said = r"Rank 1 failed in `fail`:(.|\n)*this rank failed"
    with Ranks(Failing, None, Place()) as ranks, pytest.raises(RankFailed, match=said):
        ranks.call("fail")


def test_a_speed_up_is_over_the_best_ddp_and_a_step_is_compared_with_one_without_communication() -> None:
    table = table_of("", {"bucketddp": [1, 2, 9], "ddp": [6, 6, 6], "ddp best": [4, 4, 4]}, unit="ms", scale=1000)
    assert [row[:4] for row in table.rows.values()] == [
        [2000, 1000, 9000, 2],
        [6000, 6000, 6000, 4 / 6],
        [4000, 4000, 4000, 1],
    ]
    assert all(math.isnan(row[4]) for row in table.rows.values())
    table = table_of("", {ALONE.name: [2, 2, 5], "bucketddp": [3, 3, 3]}, unit="ms")
    assert [row[4] for row in table.rows.values()] == [1, 1.5]


def results(scores: dict[tuple[str, int], list[float]], task: str = "digits") -> list[Result]:
    """Results of trainings by variant and number of ranks, a score for each seed."""
    return [
        Result(Run(task, variant, num_ranks, seed, 1200), 1.5, score, [2.0 - 0.01 * i for i in range(40)], 1.0, "here")
        for (variant, num_ranks), by_seed in scores.items()
        for seed, score in enumerate(by_seed)
    ]


@pytest.mark.long
def test_a_training_has_the_same_samples_on_any_number_of_ranks_and_the_numbers_of_ddp() -> None:
    runs = [Run("digits", variant, 2, 3, 6) for variant in (DDP, PLAIN, "bf16", "int8", "fp8 emulated")]
    ranks = run_on_ranks(trainings, world_size=2, runs=runs)
    ddp, plain, *fewer_bits = zip(*ranks, strict=True)
    assert ddp[0].weights == plain[0].weights
    assert ddp[0].score == plain[0].score
    assert len({trained[0].weights for trained in [plain, *fewer_bits]}) == 4
    on_two = quality.result_of(runs[1], plain)
    assert on_two.samples == [64 * step for step in range(1, 7)]
    run = replace(runs[1], num_ranks=4)
    on_four = quality.result_of(run, [rank[0] for rank in run_on_ranks(trainings, world_size=4, runs=[run])])
    assert on_four.curve == pytest.approx(on_two.curve, abs=2e-4)


def test_a_mean_is_compared_with_the_range_of_the_seeds() -> None:
    wires = {(PLAIN, 2): [0.8, 0.9], ("bf16", 2): [0.81, 0.81], ("int8", 2): [0.7, 0.8]}
    apart = {(PLAIN, 8): [0.8, 0.9], (local(10), 8): [0.9, 0.95]}
    text = markdown(results({**wires, **apart}))
    assert "| 2 | int8 | 75.0 ± 7.1, worse |  |  |" in text
    assert "| 2 | fp32 | 2 | 85.00 | 7.07 | 80.00 to 90.00 |  |  | 1.5000 |" in text
    assert "| 2 | bf16 | 2 | 81.00 | 0.00 | 81.00 to 81.00 | -4.00 ± 7.07 | within | 1.5000 |" in text
    assert "* `bf16`: its mean against the range of fp32's seeds: within for digits on 2 ranks." in text
    assert "* `local 10`: its mean against the range of fp32's seeds: better for digits on 8 ranks." in text
