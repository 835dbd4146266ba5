"""Recorded steps: every reduction is there, and at the right time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_bucketddp.config import MIB
from lightning_bucketddp.recording.schema import Step
from lightning_bucketddp.recording.writer import metrics_of
from lightning_bucketddp.reducer.observer import Axis, Clock
from tests.recording.test_schema import STEP
from tests.support.cases import for_each
from tests.support.jobs.recording import (
    CONFIGS,
    assert_in_order,
    record,
    record_a_long_backward,
)
from tests.support.ranks import run_on_ranks


def assert_ends_agree(steps: list[Step]) -> None:
    """No rank has a result before every rank has given its part. Ranks on one host have one clock."""
    for buckets in zip(*(step.buckets for step in steps), strict=True):
        assert min(bucket.ended_s for bucket in buckets) >= max(bucket.launched_s for bucket in buckets)


@for_each(
    ("case", "config"),
    [*[("mlp", config) for config in CONFIGS], ("sparse_embedding", "plain"), ("unused_on_one_rank", "plain")],
)
def test_every_reduction_is_recorded_and_in_order(case: str, config: str) -> None:
    ranks = run_on_ranks(record, case=case, config=config)
    for rank in ranks:
        assert len(rank.step.buckets) == len(rank.bucket_bytes) > 1
        assert_in_order(rank.step)
        names = [span.name for span in rank.step.spans]
        assert [name for name in names if name == "forward"] == ["forward"] * 2
        assert (names[:4], names[-1]) == (["forward", "backward"] * 2, "optimizer")
        assert rank.step.num_unused == rank.num_unused
        # Rank 0 waits for rank 1, also where the wait is at the launch.
        assert "exposed" in names
    if case != "sparse_embedding":  # whose exchange is a matter of three collectives
        assert_ends_agree([rank.step for rank in ranks])
    assert (ranks[0].num_unused + ranks[1].num_unused > 0) == (case == "unused_on_one_rank")


def test_bytes_are_those_that_travel() -> None:
    [plain, _], [halved, _] = (run_on_ranks(record, case="mlp", config=config) for config in ("plain", "bf16"))
    assert plain.step.bytes_on_wire == sum(plain.bucket_bytes)
    assert halved.step.bytes_on_wire == sum(plain.bucket_bytes) / 2


def test_a_hook_that_is_waited_for_at_its_launch_is_exposed_there() -> None:
    for rank in run_on_ranks(record, case="mlp", config="hook"):
        exposed = [(span.start_s, span.end_s) for span in rank.step.spans if span.name == "exposed"]
        before_end = rank.step.buckets[:-1]
        assert exposed[: len(before_end)] == [(bucket.launched_s, bucket.ended_s) for bucket in before_end]


def test_an_end_is_seen_when_it_comes_and_not_when_it_is_waited_for() -> None:
    for rank in run_on_ranks(record_a_long_backward):
        first, *_, last = rank.step.buckets
        assert first.ended_s < last.ready_s


def test_an_axis_that_moves_tells_the_same_time() -> None:
    class FewDigits(Clock):
        """As a GPU's events, which tell times far apart with few digits."""

        def seconds(self, start: float, stop: float) -> float:
            return float(torch.tensor(stop - start, dtype=torch.float16))

    axis = Axis(FewDigits())
    axis.seconds(Clock().mark())
    start = axis._origin
    origin = axis.seconds(start)
    for number in range(1, 4):
        axis.move_to(start + 1000 * number)
    assert axis.seconds(start + 3000.25) == pytest.approx(origin + 3000.25, abs=0.05)


def test_what_is_logged_are_means() -> None:
    # Two seconds of communication; of four ranks each link carries 1.5 times the bytes.
    steps = [replace(STEP, plan=n, bytes_on_wire=MIB * n, num_unused=n) for n in (1, 3)]
    assert metrics_of(steps, num_ranks=1)["bandwidth_gbit_s"] == 0
    assert metrics_of(steps, num_ranks=4) == {
        "step_ms": 4000,
        "communication_ms": 2000,
        "exposed_ms": 500,
        "overlap_pct": 75,
        "mb_on_wire": 2,
        "bandwidth_gbit_s": pytest.approx(1.5 * MIB * 8 / 1e9),
        "buckets": 2,
        "unused_parameters": 2,
        "skipped_batches_per_step": 0,
        "plan_version": 3,
    }
