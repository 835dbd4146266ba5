"""Which records are found, how those of all ranks come onto one clock, and which steps are shown."""

from __future__ import annotations

import os
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from lightning_bucketddp.recording.schema import FOLDER, align, find_folder, path_of, read_run, shown_steps
from tests.support.recordings import Recording


def test_a_folder_with_records_is_taken_as_it_is_and_of_several_below_the_newest(tmp_path: Path) -> None:
    folders = [Recording().write(tmp_path / f"version_{i}" / FOLDER) for i in range(3)]
    for age, folder in zip([20, 0, 10], folders, strict=True):
        for file in folder.iterdir():
            os.utime(file, (1e9 - age, 1e9 - age))
    assert find_folder(tmp_path) == folders[1]
    assert find_folder(folders[0]) == folders[0]


def test_all_that_the_ranks_have_written_is_read_and_a_rank_of_another_run_is_left_out(tmp_path: Path) -> None:
    recording = Recording(num_ranks=3)
    record = read_run(recording.write(tmp_path))
    assert list(record.ranks) == [0, 1, 2]
    assert record.problems == []
    assert record.step_numbers == [0, 10, 20, 30, 40]
    assert [record.ranks[rank].steps[20] for rank in range(3)] == recording.step(20)
    assert record.last_plan == recording.plan
    assert record.first.profile == recording.profile
    record = read_run(Recording(num_ranks=2).write(tmp_path))
    assert list(record.ranks) == [0, 1]
    assert record.problems == ["Rank 2 was left out: it is of another run, with 3 ranks."]


def test_missing_and_damaged_ranks_are_named_and_left_out(tmp_path: Path) -> None:
    folder = Recording(num_ranks=5).write(tmp_path)
    path_of(folder, 1).unlink()
    path_of(folder, 2).write_text("not a record\n")
    path_of(folder, 3).write_bytes(b"\xff\xfe\n")
    path_of(folder, 4).write_text("")
    record = read_run(folder)
    assert list(record.ranks) == [0]
    missing, not_json, not_text, empty = sorted(record.problems)
    assert missing == "Of 5 ranks, these are missing: 1, 2, 3, 4."
    assert not_json.startswith("rank-2.jsonl was left out: Line 1 of ")
    assert not_text.startswith("rank-3.jsonl was left out: ")
    assert empty == "rank-4.jsonl was left out: It holds no step."


def test_of_two_runs_in_one_file_the_last_is_read(tmp_path: Path) -> None:
    old = path_of(Recording(steps=range(100)).write(tmp_path / "old"), 0).read_text()
    new = path_of(Recording(steps=range(3)).write(tmp_path), 0)
    new.write_text(old + new.read_text())
    assert list(read_run(tmp_path).ranks[0].steps) == [0, 1, 2]


def test_ranks_with_different_clocks_come_onto_one(tmp_path: Path) -> None:
    recording = Recording(num_ranks=3, slowness={2: 1.4})
    true = recording.step(30)
    clocks = replace(recording, clock_s={1: 5e3, 2: -77.7})
    aligned = align(read_run(clocks.write(tmp_path)), 30)
    for rank, step in aligned.items():
        for span, expected in zip(step.spans, true[rank].spans, strict=True):
            assert (span.start_s, span.end_s) == pytest.approx((expected.start_s, expected.end_s), abs=1e-9)
        for times, wanted in zip(step.buckets, true[rank].buckets, strict=True):
            assert astuple(times) == pytest.approx(astuple(wanted), abs=1e-9)


def test_without_reductions_ranks_are_taken_to_begin_together(tmp_path: Path) -> None:
    aligned = align(read_run(Recording(num_buckets=0, clock_s={1: 9.0}).write(tmp_path)), 0)
    assert aligned[1].start_s == pytest.approx(aligned[0].start_s)


def test_all_steps_are_shown_while_there_is_room_and_then_some_with_the_slowest_and_the_last(tmp_path: Path) -> None:
    record = read_run(Recording(num_ranks=2, num_buckets=4).write(tmp_path))
    # 2 ranks, each with 5 spans and 4 reductions.
    assert shown_steps(record) == shown_steps(record, most_bars=5 * 18) == [0, 10, 20, 30, 40]
    record = read_run(Recording(num_ranks=2, num_buckets=4, steps=range(100)).write(tmp_path))
    step = record.ranks[1].steps[33]
    longer = replace(step.spans[-1], end_s=step.end_s + 1)
    record.ranks[1].steps[33] = replace(step, spans=[*step.spans[:-1], longer])
    assert shown_steps(record, most_bars=10 * 18) == [0, 10, 20, 30, 33, 40, 50, 60, 70, 80, 90, 99]
