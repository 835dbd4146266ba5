"""`bucketddp report`: what it writes, what it says, and what it answers to mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_bucketddp.cli import main
from lightning_bucketddp.commands.report import page_content, print_comparison, typical_step_of
from lightning_bucketddp.recording.schema import FOLDER, path_of, read_run
from tests.support.programs import run_python
from tests.support.recordings import Recording, with_weights


def test_a_page_and_a_trace_are_written_and_opened(tmp_path: Path) -> None:
    folder = Recording().write(tmp_path / "version_0" / FOLDER)
    page, trace, opened = tmp_path / "page.html", tmp_path / "trace.json", tmp_path / "opened"
    viewer = tmp_path / "viewer"
    viewer.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    viewer.chmod(0o755)
    arguments = [str(tmp_path), "--output", str(page), "--trace", str(trace), "--open"]
    printed = run_python("-m", "lightning_bucketddp.cli", "report", *arguments, BROWSER=str(viewer))
    first, *written = printed.splitlines()
    assert first == f"Read 2 ranks and 5 steps from {folder}"
    assert [line.partition(" (")[0] for line in written] == [f"Wrote the page: {page}", f"Wrote the trace: {trace}"]
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(trace.read_text())["traceEvents"]
    assert opened.read_text().strip() == page.as_uri()


def test_missing_ranks_and_mistakes_are_answered_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"bucketddp report: No rank has left a record in {tmp_path}")
    folder = Recording(num_ranks=3).write(tmp_path / FOLDER)
    path_of(folder, 1).unlink()
    assert main(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("Read 2 ranks and 5 steps")
    assert printed.err == "Note: Of 3 ranks, these are missing: 1.\n"
    nowhere = tmp_path / "no" / "page.html"
    assert main(["report", str(folder), "--output", str(nowhere)]) == 2
    assert str(nowhere) in capsys.readouterr().err


def test_the_wait_of_a_rank_beside_a_prediction_is_that_for_gradients(tmp_path: Path) -> None:
    record = read_run(Recording(slowness={1: 2.0}).write(tmp_path))
    for ours in record.ranks.values():
        ours.steps.update({number: with_weights(step) for number, step in ours.steps.items()})
    content, typical = page_content(record), typical_step_of(record)
    assert [rank["exposed"] for rank in content["ranks"]] == [
        pytest.approx(1e3 * (rank.exposed_s - rank.phases["weights"]), abs=0.001) for rank in typical.ranks
    ]
    assert all(rank.phases["weights"] > 0 for rank in typical.ranks)


def test_two_runs_are_compared_and_a_slower_one_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual, slow = Recording().write(tmp_path / "a"), Recording(slowness={0: 2.0, 1: 2.0}).write(tmp_path / "b")
    assert main(["report", "--compare", str(usual), str(usual)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("B takes as long: +0.0%, noise 3.0")
    assert main(["report", "--compare", str(usual), str(slow)]) == 1
    header, *_, all_of_it, verdict = capsys.readouterr().out.splitlines()
    assert header.split() == ["one", "step", "A", "ms", "B", "ms", "B", "/", "A"]
    assert float(all_of_it.split()[-1]) > 1.5
    assert verdict.startswith("B is slower: +")
    assert main(["report", "--compare", str(slow), str(usual)]) == 0
    assert "B is faster: -" in capsys.readouterr().out
    a = typical_step_of(read_run(usual))
    assert print_comparison(a, replace(a, phases={**a.phases, "weights": 0.01})) == 1
    assert "waiting for weights           0.00     10.00       -" in capsys.readouterr().out
    assert main(["report"]) == main(["report", str(usual), "--compare", str(usual), str(slow)]) == 2
    assert "pass the folder of a run, or --compare with two of them" in capsys.readouterr().err
