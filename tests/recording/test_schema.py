"""What a rank writes down is what is read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lightning_bucketddp.planning.cost import AllReduceCost, Profile
from lightning_bucketddp.planning.plan import ParameterSpec
from lightning_bucketddp.recording.schema import (
    BucketTimes,
    GatherTimes,
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
# Weights of the step before travel for 1.5 s, one bucket after the other, and forward waits for the last of them.
SHARDED = replace(
    STEP,
    spans=[Span("data", -1.0, -0.5), Span("weights", -0.5, 0.0), *STEP.spans],
    gathers=[GatherTimes(1, -1.5, -0.75), GatherTimes(0, -1.25, 0.0)],
)
LINES: list[Line] = [
    Run(0, 2, "a", "cpu", "gloo", num_parameters=3, gradient_bytes=12, options={"bucket_cap_mb": "auto"}),
    RecordedPlan(1, [RecordedBucket(["b", "a"], [4, 8]), RecordedBucket(["e"], [0], sparse=True)]),
    STEP,
    RecordedPlan(2, [RecordedBucket(["a"], [4], sharded=True, collective="reduce-scatter")]),
    SHARDED,
    Profile([ParameterSpec("a", 4, "f32")], [0.1], backward_s=0.2, cost=AllReduceCost(1e-3, 1e-9), num_ranks=2),
]


def test_what_was_written_is_read_but_for_a_line_that_a_killed_process_left(tmp_path: Path) -> None:
    path = path_of(tmp_path, rank=0)
    with path.open("w") as file:
        for line in LINES:
            write(line, file)
    assert list(read(path)) == LINES
    path.write_text(path.read_text()[:-5])
    assert list(read(path)) == LINES[:-1]


def test_reductions_run_one_after_the_other() -> None:
    assert STEP.reductions() == [Span("bucket 0", 1.5, 2.5), Span("bucket 1", 2.5, 3.5)]
    assert STEP.communication_s == 2.0
    assert STEP.exposed_s == 0.5
    assert STEP.overlap == 0.75


def test_weights_travel_one_after_the_other_and_waiting_for_them_is_exposed() -> None:
    assert SHARDED.exchanges() == [Span("weights 1", -1.5, -0.75), Span("weights 0", -0.75, 0.0)]
    assert SHARDED.communication_s == 2.0 + 1.5
    assert SHARDED.exposed_s == 0.5 + 0.5
    assert SHARDED.own_s == SHARDED.step_s - 1.0 == 4.0
