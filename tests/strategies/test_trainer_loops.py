"""Options of the Trainer that change its loops do the same with `bucketddp` as with `ddp`, on two processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.scripts.loops import LOOPS, profile, resume_within_an_epoch, train_with_loops


@pytest.mark.parametrize("loops", list(LOOPS))
@pytest.mark.sampled(9)
def test_training_equals_ddp(loops: str, tmp_path: Path) -> None:
    ours = run_on_ranks(train_with_loops, loops=loops, strategy="bucketddp", directory=tmp_path)
    ddp = run_on_ranks(train_with_loops, loops=loops, strategy="ddp", directory=tmp_path)
    assert ours == ddp
    assert ours[0]["weights"] == ours[1]["weights"]


def test_the_profiler_of_torch_shows_our_phases(tmp_path: Path) -> None:
    for phases in run_on_ranks(profile, directory=tmp_path):
        assert phases == ["bucketddp::finish", "bucketddp::launch"]


def test_a_run_resumed_within_an_epoch_equals_ddp(tmp_path: Path) -> None:
    ours = run_on_ranks(resume_within_an_epoch, strategy="bucketddp", directory=tmp_path / "ours")
    ddp = run_on_ranks(resume_within_an_epoch, strategy="ddp", directory=tmp_path / "ddp")
    assert ours == ddp
    assert ours[0]["weights"] == ours[1]["weights"]
    assert [len(rank["batches"]) for rank in ours] == [4 + 10] * 2
