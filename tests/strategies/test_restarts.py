"""A run that is ended and started again leaves what an uninterrupted one leaves, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.startup.test_clusters import unused_job_id
from tests.support.programs import SCRIPTS, Program, Run, run, run_together
from tests.support.ranks import run_on_ranks
from tests.support.scripts import restarts
from tests.support.scripts.trainers import like_torchrun

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


# Who finds the checkpoint, and where it was within an epoch: Lightning and a loader with a state, or `auto_resume`.
WAYS = [pytest.param([], id="ckpt_path"), pytest.param(["by-itself"], id="auto_resume", marks=pytest.mark.long)]


@pytest.mark.long  # that torchrun starts ranks again: tests/startup/test_startup.py
@pytest.mark.parametrize("way", WAYS)
def test_torchrun_restarts_from_the_last_whole_checkpoint(
    way: list[str], uninterrupted: list[dict[str, Any]], tmp_path: Path
) -> None:
    # Within an epoch; then at the end of one, in the middle of writing.
    plan = [{"rank": 1, "step": 5}, {"rank": 0, "step": 12, "while": "saving"}]
    finished = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"),
        SCRIPTS / "restarts.py",
        json.dumps(plan),
        *way,
        root="lightning.pytorch",
        directory=tmp_path,
    )
    assert finished.returncode == 0, finished.output
    begun = [[finished.results[f"attempt{attempt}.rank{rank}"] for rank in range(2)] for attempt in range(3)]
    assert begun == [[0, 0], [4, 4], [10, 10]]
    for rank in range(2):
        assert finished.results[f"end.rank{rank}"] == uninterrupted[rank]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.long
def test_slurm_requeues_from_where_the_signal_came(
    way: list[str], uninterrupted: list[dict[str, Any]], tmp_path: Path
) -> None:
    # To one rank, in the middle of a step: what is saved is the state after a step, and all ranks save it.
    plan = [{"rank": 1, "step": 7, "while": "stepping"}]
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    # As SLURM does: the job's processes are killed and it is started again.
    scontrol.write_text('#!/bin/sh\necho "$@" > "$RESULTS/scontrol.txt"\nkill -9 $(cat "$RESULTS"/*.pid)\n')
    scontrol.chmod(0o755)
    job_id = unused_job_id()
    first = run_slurm_job(job_id, plan, way, restart_count=0, directory=tmp_path)
    assert first.returncode != 0, first.output
    assert (tmp_path / "scontrol.txt").read_text() == f"requeue {job_id}\n"
    second = run_slurm_job(job_id, plan, way, restart_count=1, directory=tmp_path)
    assert second.returncode == 0, second.output
    assert [second.results[f"attempt1.rank{rank}"] for rank in range(2)] == [9, 9]
    for rank in range(2):
        assert second.results[f"end.rank{rank}"] == uninterrupted[rank]


def run_slurm_job(
    job_id: int, plan: list[dict[str, Any]], way: list[str], *, restart_count: int, directory: Path
) -> Run:
    tasks = [
        Program(
            [SCRIPTS / "restarts.py", json.dumps(plan), *way],
            variables={
                "PATH": f"{directory}/bin:{os.environ['PATH']}",
                "SLURM_JOB_ID": str(job_id),
                "SLURM_JOB_NAME": "train",
                "SLURM_NTASKS": "2",
                "SLURM_NTASKS_PER_NODE": "2",
                "SLURM_NNODES": "1",
                "SLURM_NODELIST": "127.0.0.1",
                "SLURM_JOB_NODELIST": "127.0.0.1",
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": str(task),
                "SLURM_NODEID": "0",
                "SLURM_RESTART_COUNT": str(restart_count),
            },
        )
        for task in range(2)
    ]
    return run_together(*tasks, root="lightning.pytorch", directory=directory)
