"""What a rank writes down is what is read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_bucketddp.planning.all_reduce_cost import AllReduceCost
from lightning_bucketddp.planning.backward_profile import Profile
from lightning_bucketddp.planning.plan import ParameterSpec
from lightning_bucketddp.recording.schema import (
    BucketTimes,
    Line,
    RecordedBucket,
    RecordedPlan,
    Run,
    Span,
    Step,
    path_of,
    read,
    write,
)

STEP = Step(
    step=7,
    plan=1,
    spans=[Span("forward", 0.0, 1.0), Span("backward", 1.0, 3.0), Span("exposed", 3.0, 3.5), Span("optimizer", 3.5, 4)],
    buckets=[BucketTimes(1.5, 1.5, 2.5), BucketTimes(2.0, 2.0, 3.5)],
    bytes_on_wire=12,
)
LINES: list[Line] = [
    Run(0, 2, "a", "cpu", "gloo", num_parameters=3, gradient_bytes=12, options={"bucket_cap_mb": "auto"}),
    RecordedPlan(1, [RecordedBucket(["b", "a"], [4, 8]), RecordedBucket(["e"], [0], sparse=True)]),
    STEP,
    Profile([ParameterSpec("a", 4, "f32")], [0.1], backward_s=0.2, cost=AllReduceCost(1e-3, 1e-9), num_ranks=2),
]


def write_lines(path: Path) -> None:
    with path.open("w") as file:
        for line in LINES:
            write(line, file)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = path_of(tmp_path, rank=0)
    write_lines(path)
    assert list(read(path)) == LINES


def test_a_line_that_a_killed_process_left_is_ignored(tmp_path: Path) -> None:
    path = path_of(tmp_path, rank=0)
    write_lines(path)
    path.write_text(path.read_text()[:-5])
    assert list(read(path)) == LINES[:-1]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"kind": "run", "rank": 0}\n\n')
    with pytest.raises(ValueError, match=r"Line 1 of .*rank-0.jsonl is no record of bucketddp"):
        list(read(path))


def test_reductions_run_one_after_the_other() -> None:
    assert STEP.reductions() == [Span("bucket 0", 1.5, 2.5), Span("bucket 1", 2.5, 3.5)]
    assert STEP.communication_s == 2.0
    assert STEP.exposed_s == 0.5
    assert STEP.overlap == 0.75
