"""The benchmark between two hosts: it measures over a network as slow as asked for, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.slow_network import main
from tests.support.programs import REPOSITORY, Program, run_together

OPTIONS = ["--model", "gpt2_shapes", "--rate", "100mbit", "--local-steps", "4"]
COMMAND = ["-m", "benchmarks.slow_network", *OPTIONS]
REFUSAL = "No hosts to measure between: "
REMEDY = (
    ". This benchmark makes network namespaces: run it as root, or where users may make them (in Docker with `--cap-add"
    " SYS_ADMIN --cap-add NET_ADMIN`).\n"
)


@pytest.mark.long
def test_steps_wait_for_the_network(tmp_path: Path) -> None:
    options = ["--bucket-cap-mb", "0.1", "--repetitions", "1", "--steps", "1", "--settle", "2", "--ddp", "--json"]
    # Not warm: of ranks that start in a moment, too few bytes were counted for a step.
    finished = run_together(
        Program([*COMMAND, *options, tmp_path / "found.json"], python=sys.executable),
        root="lightning.pytorch",
        directory=tmp_path,
        cwd=REPOSITORY,
    )
    if finished.returncode != 0:
        assert_refused(finished.output)
        return
    [table] = finished.results["found"]["tables"]
    assert table["title"] == "gpt2_shapes, two hosts, 100mbit between them"
    assert table["title"] in finished.output
    times, sent, predicted = (
        {name: row[table["columns"].index(column)] for name, row in table["rows"].items()}
        for column in ("median ms", "MiB sent", "predicted ms")
    )
    ours = [f"bucketddp{cap}, {wire}" for wire in ("fp32", "bf16", "int8") for cap in ("", " 0.1 MiB")]
    assert [name for name in times if name.startswith("bucketddp")] == ours
    assert any(name.startswith("ddp") for name in times)
    assert sum(name.startswith("ddp bf16") for name in times) > 1
    # 485 KB take 39 ms at that rate, of which a burst may save 20.
    assert min(times[name] for name in ("all-reduce alone", ours[0], "ddp")) > 15
    assert times["no communication"] > 0
    # What the kernel counts has frames around it, and the exchange between ranks beside it.
    fp32, _, bf16, _, int8, _ = (sent[name] * 2**20 for name in ours)
    assert 485_000 < fp32 < 600_000
    assert 0.45 < bf16 / fp32 < 0.6
    assert 0.25 < int8 / fp32 < 0.45
    assert 0.2 < sent["local_steps=4"] * 2**20 / fp32 < 0.3
    assert all(predicted[name] > 0 for name in [*ours, "local_steps=4"])


def test_a_machine_without_the_tools_is_told_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(OPTIONS)
    monkeypatch.undo()
    assert f"{ended.value}\n" == f"{REFUSAL}`unshare` is not installed (package util-linux){REMEDY}"


def assert_refused(output: str) -> None:
    assert output.startswith(REFUSAL)
    assert output.endswith(REMEDY)


def test_a_loopback_carries_twice_the_rate_asked_for_both_directions() -> None:
    show = ["tc", "-json", "qdisc", "show", "dev", "lo"]
    command = [sys.executable, "-m", "benchmarks.loopback", "--rate", "100mbit", *show]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    if "unshare failed" in finished.stderr:
        return  # this machine gives its users no namespaces
    [limit] = json.loads(finished.stdout)
    assert (limit["kind"], limit["options"]["rate"]) == ("tbf", 200e6 / 8)
