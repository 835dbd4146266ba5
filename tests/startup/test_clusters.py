"""Processes that a cluster's tools start, on one node and on two, and jobs of Hydra."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.hosts import Host, two_hosts
from tests.support.programs import SCRIPTS, Program, Run, assert_trained, run, run_together, weights_on_one_host

# --- SLURM


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_slurm_starts_the_processes(num_nodes: int, tmp_path: Path) -> None:
    job = slurm_job(num_nodes=num_nodes)
    sizes = ["--devices", str(2 // num_nodes), "--num-nodes", str(num_nodes)]
    tasks = [
        Program([SCRIPTS / "fit.py", "bucketddp", *sizes], {**job, **slurm_task(rank, num_nodes)}) for rank in (0, 1)
    ]
    finished = run_together(*tasks, root="lightning.pytorch", directory=tmp_path)
    ranks = assert_trained(finished, root="lightning.pytorch", name="bucketddp")
    assert [rank["node"] for rank in ranks] == ([0, 0] if num_nodes == 1 else [0, 1])


def slurm_job(*, num_nodes: int) -> dict[str, str]:
    """The variables of a job with two tasks, on nodes that are all this machine."""
    nodes = "127.0.0.[1-2]" if num_nodes == 2 else "127.0.0.1"
    return {
        "SLURM_JOB_ID": str(unused_job_id()),
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": str(2 // num_nodes),
        "SLURM_NNODES": str(num_nodes),
        "SLURM_NODELIST": nodes,
        "SLURM_JOB_NODELIST": nodes,
    }


def slurm_task(rank: int, num_nodes: int) -> dict[str, str]:
    """The variables of one of its tasks."""
    local, node = (rank, 0) if num_nodes == 1 else (0, rank)
    return {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}


def unused_job_id() -> int:
    """The ranks of a job meet at port 15000 plus the last four digits of its number."""
    for job_id in random.sample(range(1000, 10000), 100):
        with suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", 15000 + job_id))
            return job_id
    raise AssertionError("no free port")


# --- Nodes of their own


def test_torchrun_starts_processes_on_two_nodes(tmp_path: Path) -> None:
    width = 512
    with two_hosts() as hosts:
        finished = torchrun(hosts, width=width, directory=tmp_path)
        ranks = assert_trained(finished, root="lightning.pytorch", name="bucketddp", width=width)
        num_bytes_sent = [host.num_bytes_sent for host in hosts]
    assert [rank["node"] for rank in ranks] == [0, 1]
    assert len({rank["network"] for rank in ranks}) == 2
    # The gradients went through the cable.
    num_gradient_bytes = 4 * width * width * ranks[0]["steps"]
    assert all(num_bytes >= num_gradient_bytes for num_bytes in num_bytes_sent)


def torchrun(hosts: tuple[Host, Host], *, width: int, directory: Path) -> Run:
    programs = [
        Program(
            [
                *("-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)),
                *("--nproc-per-node", "1"),
                *("--master-addr", hosts[0].address, "--master-port", "29500"),
                *(SCRIPTS / "fit.py", "bucketddp", "--width", str(width)),
                *("--num-nodes", "2", "--devices", "1"),
            ],
            within=host.within,
        )
        for node, host in enumerate(hosts)
    ]
    return run_together(*programs, root="lightning.pytorch", directory=directory)


# --- Hydra


def run_hydra_job(directory: Path, *strategy: str) -> Run:
    """Run a job that instantiates `strategy` and changes to a directory of its own, below `directory`."""
    directory.mkdir()
    options = ["hydra.job.chdir=True", "hydra.run.dir=of job", *strategy]
    return run(SCRIPTS / "hydra_job.py", *options, root="lightning.pytorch", directory=directory)


@pytest.mark.long
def test_a_hydra_job_starts_its_processes_and_leaves_the_files_that_it_leaves_with_ddp(tmp_path: Path) -> None:
    ours = run_hydra_job(
        tmp_path / "ours", "+strategy._target_=lightning_bucketddp.BucketDDPStrategy", "+strategy.bucket_cap_mb=[1,5]"
    )
    ranks = assert_trained(ours, root="lightning.pytorch", bucket_cap_mb=[1, 5])
    assert [rank["directory"] for rank in ranks] == [str(tmp_path / "ours" / "of job")] * 2
    ddp = run_hydra_job(tmp_path / "ddp", "+strategy._target_=lightning.pytorch.strategies.DDPStrategy")
    assert ddp.results["run.rank0"]["weights"] == weights_on_one_host()
    assert files_below(tmp_path / "ours") == files_below(tmp_path / "ddp")


def files_below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
