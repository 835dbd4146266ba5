"""A run that is ended and started again leaves what an uninterrupted one leaves, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.programs import SCRIPTS, run
from tests.ranks import run_on_ranks
from tests.scripts import restarts
from tests.scripts.trainers import like_torchrun

NUM_STEPS = restarts.NUM_EPOCHS * restarts.STEPS_PER_EPOCH


@like_torchrun()
def uninterrupted_run(*, directory: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(restarts.train(directory)))
    return result


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank ends with."""
    ranks = run_on_ranks(uninterrupted_run, directory=tmp_path_factory.mktemp("uninterrupted"))
    assert [rank["steps"] for rank in ranks] == [NUM_STEPS] * 2
    return ranks


def test_torchrun_restarts_from_the_last_whole_checkpoint(uninterrupted: list[dict[str, Any]], tmp_path: Path) -> None:
    # Within an epoch; then at the end of one, in the middle of writing.
    plan = [{"rank": 1, "step": 5}, {"rank": 0, "step": 12, "while": "saving"}]
    finished = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"),
        *(SCRIPTS / "restarts.py", json.dumps(plan)),
        root="lightning.pytorch",
        directory=tmp_path,
    )
    assert finished.returncode == 0, finished.output
    begun = [[finished.results[f"attempt{attempt}.rank{rank}"] for rank in range(2)] for attempt in range(3)]
    assert begun == [[0, 0], [4, 4], [10, 10]]
    for rank in range(2):
        assert finished.results[f"end.rank{rank}"] == uninterrupted[rank]
