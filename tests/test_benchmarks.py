"""The benchmarks run, and say what they have measured. What they measure is in `benchmarks/results`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_suite, growth, host_overhead, memory, monitor_overhead, overlap, step_time
from benchmarks.models import _GPT2, SHRUNK_BY, _gpt2_sizes, _resnet50_sizes, build
from benchmarks.ranks import Place, RankFailed, Ranks
from benchmarks.report import table_of
from benchmarks.turns import take_turns
from benchmarks.variants import ALONE, ddp_variants, our_variants, with_unused
from tests.support.jobs.benches import Failing

OURS = "bucketddp"
THEIRS = [variant.name for variant in ddp_variants()]
SMALL = ["--model", "gpt2_shapes", "--settle", "2"]
BRIEF = ["--repetitions", "1"]
GROWTH_PHASES = [
    "rendezvous",
    "process group",
    "a further group",
    "agreement on parameters",
    "weights of rank 0",
    "first backward",
    "second backward",
    "third backward",
    "1,000 questions to the store",
    "watchdog, first 0.5 s",
    "watchdog, later 0.5 s",
]
UNUSED = [f"{name} (layers unused)" for name in (ALONE.name, OURS, *THEIRS[:-1])]

# What is run, and the rows that each of its tables must have.
COMMANDS: dict[str, tuple[Callable[..., Any], list[str], list[list[str]]]] = {
    "step_time": (
        step_time.main,
        [*SMALL, *BRIEF, "--steps=1", "--unused=changing"],
        [[ALONE.name, OURS, *THEIRS], UNUSED],
    ),
    "step_time, caps": (
        step_time.main,
        [
            *SMALL,
            *BRIEF,
            "--steps=1",
            "--ranks=1",
            "--wire=bf16",
            "--bucket-cap-mb",
            "1",
            "2.5",
            "--no-check-gradients",
        ],
        [
            [
                ALONE.name,
                *(f"bucketddp, gradients unchecked {cap} MiB" for cap in ("1", "2.5")),
                *(variant.name for variant in ddp_variants(wire="bf16")),
            ]
        ],
    ),
    "step_time, trainer": (
        step_time.main,
        [*SMALL, *BRIEF, "--steps=1", "--through=trainer", "--accumulate=2"],
        [[ALONE.name, OURS, *THEIRS[:-1]]],
    ),
    "overlap": (overlap.main, [*SMALL, *BRIEF, "--steps=1"], [[ALONE.name, OURS, *THEIRS]]),
    "memory": (memory.main, [*SMALL, "--ranks=1"], [[OURS, *THEIRS]]),
    "monitor_overhead": (
        monitor_overhead.main,
        [*SMALL, *BRIEF, "--steps=2"],
        [[variant.name for variant in monitor_overhead.VARIANTS]],
    ),
    "growth": (
        growth.main,
        [*BRIEF, "--exchange", "2", "5", "--set-up", "3", "--watch=0.5"],
        [["2", "5"], GROWTH_PHASES],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_prints_and_writes_all_variants(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, arguments, expected = COMMANDS[name]
    main([*arguments, "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert [list(table["rows"]) for table in found["tables"]] == expected
    assert f"torch {torch.__version__}" in found["about"]
    printed = capsys.readouterr().out
    for table in found["tables"]:
        assert table["title"] in printed
        assert all(len(row) == len(table["columns"]) for row in table["rows"].values())
        assert name in ("memory", "growth") or set(table["samples"]) >= set(table["rows"])


@pytest.mark.long
def test_models_are_cut_down_but_not_their_number_of_buckets(tmp_path: Path) -> None:
    host_overhead.main(["--model=gpt2_shapes", *BRIEF, "--json", str(tmp_path / "found.json")])
    [table] = json.loads((tmp_path / "found.json").read_text())["tables"]
    assert list(table["rows"]) == [OURS, host_overhead.REDUCING, *THEIRS]
    num_buckets = {name: row[2] for name, row in table["rows"].items()}
    assert num_buckets.pop(OURS) == 0
    assert all(number > 10 for number in num_buckets.values())


@pytest.mark.parametrize(
    "main",
    [host_overhead.main, step_time.main, overlap.main, memory.main, monitor_overhead.main, gpu_suite.main, growth.main],
)
def test_a_benchmark_explains_itself(main: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "python -m benchmarks." in capsys.readouterr().out


@pytest.mark.long
def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    overlap.main([*SMALL, *BRIEF, "--steps=1", "--png", str(tmp_path / "found.png")])
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_plot_without_matplotlib_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.command.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        overlap.main(["--png", "found.png"])
    assert "--png: needs matplotlib: pip install 'lightning-bucketddp[bench]'" in capsys.readouterr().err


def test_a_hook_that_lightning_ignores_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step_time.main(["--through=trainer", "--wire=bf16"])
    assert "Lightning ignores torch DDP's hooks on the CPU" in capsys.readouterr().err


@pytest.mark.long
def test_the_suite_goes_on_after_a_part_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(stage: Any, title: str, seconds: float) -> Any:
        raise RuntimeError("this part failed")

    by_title = {part.title: part for part in gpu_suite.PARTS}
    titles = [
        "gpt2, 2 ranks, through the Trainer",
        "resnet50, 2 ranks, unused layers",
    ]
    monkeypatch.setattr(gpu_suite.Stage, "start", lambda self: None)  # each group when it is needed
    monkeypatch.setattr(gpu_suite, "MOST_ROUNDS", 1)
    monkeypatch.setattr(gpu_suite, "PARTS", [gpu_suite.Part("fails", 1, fail), *(by_title[title] for title in titles)])
    assert gpu_suite.main(["--device=cpu", "--seconds=170", f"--out={tmp_path}"]) == 1
    found = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert list(found["missing"]) == ["fails"]
    assert "this part failed" in found["missing"]["fails"]
    assert [table["title"].split(";")[0] for table in found["tables"]] == titles
    assert list(found["tables"][0]["rows"]) == ["bucketddp, network settings", "bucketddp", "ddp"]
    assert all(table["title"] in (tmp_path / "gpu_suite.txt").read_text() for table in found["tables"])


def test_the_suite_begins_nothing_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_suite.Stage, "start", lambda self: None)
    assert gpu_suite.main(["--device=cpu", "--seconds=0", f"--out={tmp_path}"]) == 1
    found = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert found["missing"] == {part.title: "no time was left" for part in gpu_suite.PARTS}


@pytest.mark.parametrize(
    ("how", "said"), [("fail", r"Rank 1 failed in `fail`:(.|\n)*this rank failed"), ("die", "Rank 1 died in `die`")]
)
def test_a_rank_that_fails_ends_the_benchmark(how: str, said: str) -> None:
    with Ranks(Failing, None, Place()) as ranks, pytest.raises(RankFailed, match=said):
        ranks.call(how)


def test_variants_take_turns() -> None:
    order: list[str] = []
    turns = {name: (lambda name=name: order.append(name) or len(order)) for name in ("a", "b")}
    assert take_turns(turns, repetitions=3) == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert order == ["a", "b"] * 3


def test_rounds_end_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("benchmarks.turns.time.monotonic", lambda: now[0])

    def turn() -> float:
        now[0] += 10 if now[0] == 0 else 2  # the first round builds everything
        return now[0]

    assert take_turns({"a": turn}, repetitions=50, seconds=17) == {"a": [10, 12, 14, 16]}


def test_a_speed_up_is_over_the_best_ddp() -> None:
    table = table_of("", {"bucketddp": [1, 2, 9], "ddp": [6, 6, 6], "ddp best": [4, 4, 4]}, unit="ms", scale=1000)
    assert table.rows == {"bucketddp": [2000, 2], "ddp": [6000, 4 / 6], "ddp best": [4000, 1]}


def test_efficiency_is_one_where_all_that_can_be_hidden_is() -> None:
    samples = {
        "phases": {"forward": [2.0], "backward": [4.0], "optimizer": [1.0]},
        "step": {"bucketddp": [9.0], "ddp": [14.0]},
        "communication": {"bucketddp": [6.0], "ddp": [3.0]},
    }
    table = overlap.table_of_limits("", samples)
    assert [row[3] for row in table.rows.values()] == [1.0, 0.5]


def test_overhead_is_the_ratio_of_medians() -> None:
    table = monitor_overhead.table_of_ratios("", {"no monitor": [0.1, 0.2, 0.9], "monitor": [0.1, 0.202, 0.9]})
    assert table.rows == {"no monitor": [200, 0], "monitor": [202, pytest.approx(1)]}


def test_shapes_are_those_of_the_models() -> None:
    with torch.device("meta"):
        assert sorted(_gpt2_sizes()) == sorted(param.numel() for param in _GPT2().parameters())
    # torchvision is not on every machine; these are its numbers.
    assert (len(_resnet50_sizes()), sum(_resnet50_sizes())) == (161, 25_557_032)
    small = build("gpt2_shapes", torch.device("cpu"))
    assert max(param.numel() for param in small.model.parameters()) == 50257 * 768 // SHRUNK_BY


@pytest.mark.parametrize("unused", ["same", "changing"])
def test_every_tenth_layer_is_unused(unused: Any) -> None:
    workload = build("tiny_layers", torch.device("cpu"))
    without: list[set[int]] = []
    for step in range(2):
        workload.leave_out(unused, step)
        workload.model.zero_grad()
        workload.loss(workload.model).backward()
        without.append({index for index, param in enumerate(workload.model.parameters()) if param.grad is None})
    assert [len(unused) for unused in without] == [50, 50]
    assert (without[0] == without[1]) == (unused == "same")


def test_unused_layers_are_for_those_who_can_train_them() -> None:
    [ours], theirs = our_variants(), ddp_variants()
    assert with_unused(ours, "changing").options == ours.options  # type: ignore[union-attr]
    assert with_unused(theirs[0], "changing").options == {"find_unused_parameters": True}  # type: ignore[union-attr]
    assert with_unused(theirs[-1], "changing") is None
