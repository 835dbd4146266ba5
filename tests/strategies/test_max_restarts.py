"""`max_restarts`: a run goes on after faults, in the processes that are well, and ends as if there had been none."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.ports import own_port
from lightning_bucketddp.recording.schema import read_run
from lightning_bucketddp.strategies.restarts import StateAtStart
from tests.startup.test_clusters import slurm_job, slurm_task
from tests.support.hosts import two_hosts
from tests.support.programs import SCRIPTS, Program, Run, run, run_together
from tests.support.scripts.goes_on import NUM_SAMPLES

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def train(directory: Path, *faults: dict[str, Any], within: tuple[str, ...] = (), **plan: Any) -> Run:
    directory.mkdir(exist_ok=True)
    text = json.dumps({"faults": faults, **plan})
    return run(*within, SCRIPTS / "goes_on.py", text, root="lightning.pytorch", directory=directory)


def fault(what: str, *, rank: int | None = 1, step: int, always: bool = False) -> dict[str, Any]:
    return {"what": what, "rank": rank, "step": step, "always": always}


def notes(directory: Path, name: str, rank: int) -> list[Any]:
    return [json.loads(line) for line in (directory / f"{name}.rank{rank}.jsonl").read_text().splitlines()]


def weights(finished: Run) -> Any:
    assert finished.returncode == 0, finished.output
    return finished.results["end.rank0"]["weights"]


@pytest.fixture(scope="module")
def without_faults(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return weights(train(tmp_path_factory.mktemp("without_faults")))


def assert_each_sample_once(directory: Path, *, num_ranks: int = 2) -> None:
    """Each sample of an epoch is in one batch that was trained on: the last that a rank began at its step."""
    trained = {
        (rank, step): (epoch, samples)
        for rank in range(num_ranks)
        for epoch, step, samples in notes(directory, "batches", rank)
    }
    for epoch in range(2):
        samples = [sample for of, batch in trained.values() if of == epoch for sample in batch]
        assert sorted(samples) == list(range(NUM_SAMPLES))


EVERY_KIND = [
    fault("raise", step=1),
    fault("kill", step=3),
    fault("stuck", step=5),
    fault("raise", rank=0, step=7),
    fault("validation", rank=0, step=8),  # after the same batch, and not the same failure
    fault("raise", rank=None, step=10),
    fault("exit", step=12),
]


@pytest.mark.parametrize(
    ("start_method", "faults"),
    [
        ("popen", EVERY_KIND),
        (
            "fork",
            [fault("raise", rank=0, step=1), fault("kill", step=3), fault("exit with 0", step=5)],
        ),  # what a launcher has to do with
        *(pytest.param(method, EVERY_KIND, marks=pytest.mark.long) for method in ("fork", "spawn")),
    ],
    ids=["popen", "fork", "fork_every_kind", "spawn"],
)
def test_a_run_goes_on_after_every_kind_of_fault(
    start_method: str, faults: list[dict[str, Any]], without_faults: Any, tmp_path: Path
) -> None:
    finished = train(tmp_path, *faults, start_method=start_method)
    assert weights(finished) == without_faults, finished.output
    assert_each_sample_once(tmp_path)
    assert set(notes(tmp_path, "validated", 0)) == {NUM_SAMPLES}
    steps = [fault["step"] for fault in faults]
    attempts = [notes(tmp_path, "attempts", rank) for rank in range(2)]
    assert [attempt["step"] for attempt in attempts[0]] == [0, *steps]
    for rank in range(2):  # as in a new process
        assert notes(tmp_path, "counted", rank) == [[0]] * len(attempts[0])
    # Rank 0 keeps its process; rank 1 has another only where its own was gone.
    assert len({attempt["pid"] for attempt in attempts[0]}) == 1
    pids = [attempt["pid"] for attempt in attempts[1]]
    is_new = [pid != before for before, pid in itertools.pairwise(pids)]
    assert is_new == [fault["what"] in ("kill", "exit", "exit with 0") for fault in faults]
    assert finished.output.count("bucketddp: restart ") == len(faults)
    [record] = (tmp_path / ".bucketddp" / "runs").glob("*.json")
    restarts = json.loads(record.read_text())["restarts"]
    assert [restart["step"] for restart in restarts] == steps
    assert re.search("Rank 1.*SIGKILL", restarts[1]["why"])
    assert not list((tmp_path / ".bucketddp" / "runs").glob("*.ckpt"))


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_rank_zero_is_replaced_too_by_a_launcher_that_is_no_rank(
    start_method: str, without_faults: Any, tmp_path: Path
) -> None:
    faults = [fault("kill", rank=0, step=3), fault("kill", step=6), fault("exit", rank=0, step=9)]
    # From step 5 on a save waits for the validation at step 8. Only the rank that stays could know of it there.
    saving = {"every_n_train_steps": 5, "monitor": "loss", "save_on_train_epoch_end": False}
    train(tmp_path, start_method=start_method, saving={"every_n_train_steps": 2}, epochs=1)
    given = str(tmp_path / "checkpoints" / "epoch=0-step=2.ckpt")  # nor does a new process begin there again
    finished = train(tmp_path, *faults, start_method=start_method, saving=saving, ckpt_path=given)
    assert weights(finished) == without_faults, finished.output
    assert_each_sample_once(tmp_path)
    for rank, num_processes in enumerate((4, 3)):
        attempts = notes(tmp_path, "attempts", rank)
        assert [attempt["step"] for attempt in attempts] == [0, 2, 3, 6, 9]
        assert len({attempt["pid"] for attempt in attempts}) == num_processes
    assert "takes the place of rank 0, which ended with status -9." in finished.output


def test_restarts_that_come_no_further_wait_longer_and_begin_at_the_start_without_a_checkpoint(tmp_path: Path) -> None:
    """With random numbers, and with settings that callbacks change, which raise where they find what they have set."""
    plan: dict[str, Any] = {"rescue": False, "drops": True, "changes_settings": True, "epochs": 1}
    plan["options"] = {"rank_seeds": True}
    whole = weights(train(tmp_path / "whole", **plan))
    failures = [fault(what, step=2) for what in ("raise", "OSError", "exit")]
    finished = train(tmp_path / "failed", *failures, **plan)
    assert weights(finished) == whole, finished.output
    assert re.findall(r"restart \d of 10 (.*?)\.", finished.output) == ["now", "in 1 s", "in 2 s"]
    attempts = notes(tmp_path / "failed", "attempts", 0)
    assert [attempt["step"] for attempt in attempts] == [0, 0, 0, 0]
    times = [attempt["at"] for attempt in attempts]
    assert times[2] - times[1] > 1
    assert times[3] - times[2] > 2


def test_an_attempt_may_fail_before_it_trains_in_a_new_process_or_another(without_faults: Any, tmp_path: Path) -> None:
    faults = [fault("kill", step=3), fault("setup", step=0), fault("raise", step=5), fault("setup", rank=0, step=0)]
    finished = train(tmp_path, *faults, start_method="fork")
    assert weights(finished) == without_faults, finished.output
    output = " ".join(finished.output.split())
    failed = re.findall(
        r"bucketddp: restart \d of 10 .*? Rank (\d) \(process \d+ on [^ ]+\) (\w+(?: in [^ :]+)?)", output
    )
    assert failed == [("1", "died"), ("1", "failed in set-up"), ("1", "failed in forward"), ("0", "failed in set-up")]


def test_a_run_without_any_intact_checkpoint_ends_at_once_and_says_so(tmp_path: Path) -> None:
    finished = train(tmp_path, fault("no checkpoints", step=3), rescue=False)
    assert finished.returncode != 0
    assert finished.output.count("bucketddp: restart ") == 1
    assert f"StartError: `max_restarts`: no checkpoint of this run under `{tmp_path}` is intact" in finished.output


def test_a_disk_that_is_full_for_a_while_ends_neither_run_nor_processes(without_faults: Any, tmp_path: Path) -> None:
    faults = [fault("full disk", step=2), *[fault("full disk", rank=None, step=5)] * 3]  # the last three together
    finished = train(tmp_path, *faults, saving={"every_n_train_steps": 4})
    assert weights(finished) == without_faults, finished.output
    assert finished.output.count("a callback has failed before the restart: CheckpointWriteError: by chance") == 5
    for rank in range(2):
        attempts = notes(tmp_path, "attempts", rank)
        assert [attempt["step"] for attempt in attempts] == [0, 0, 4, 4, 4]
        assert len({attempt["pid"] for attempt in attempts}) == 1


def test_under_torchrun_an_exception_ends_no_process(without_faults: Any, tmp_path: Path) -> None:
    faults = [fault("raise", step=2), fault("raise", rank=0, step=5)]
    finished = train(tmp_path, *faults, within=TORCHRUN, monitor=True)
    assert weights(finished) == without_faults, finished.output
    # The page says how often, when and why.
    first, second = read_run(tmp_path / "bucketddp").problems
    assert re.match(r"Restart 1, 20\d\d-\d\d-\d\dT.*, at step 2: Rank 1 .* ValueError: by chance: raise", first)
    assert re.match(r"Restart 2, 20\d\d-\d\d-\d\dT.*, at step 5: Rank 0 .* ValueError: by chance: raise", second)
    assert all(len({attempt["pid"] for attempt in notes(tmp_path, "attempts", rank)}) == 1 for rank in range(2))


def test_the_same_failure_at_the_same_batch_twice_ends_the_run(tmp_path: Path) -> None:
    finished = train(tmp_path, fault("raise", rank=None, step=3, always=True))
    assert finished.returncode != 0
    assert "the same failure at the same batch twice is a defect of the program" in " ".join(finished.output.split())
    assert finished.output.count("bucketddp: restart ") == 1
    assert "ValueError: by chance: raise" in finished.output


@pytest.mark.parametrize("stop", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.long)])
def test_signals_end_the_run_also_between_two_attempts(stop: str, tmp_path: Path) -> None:
    finished = train(tmp_path, *(fault(what, rank=0, step=2) for what in ("raise", "OSError", stop)))
    assert finished.returncode != 0
    assert "restart 3 of 10 in 2 s" in finished.output, finished.output
    assert len(notes(tmp_path, "attempts", 0)) == 3


def test_a_later_fit_of_a_program_goes_on_in_the_same_processes_but_not_in_a_new_one(
    without_faults: Any, tmp_path: Path
) -> None:
    """Evaluations count as well: a new process would begin with the first of them."""
    faults = [{**fault("raise", step=3), "fit": 1}, {**fault("kill", step=5), "fit": 2}]
    finished = train(tmp_path, *faults, fits=3, validates=True)
    assert finished.returncode != 0
    assert finished.results["end.rank0"]["weights"] == without_faults, finished.output  # of the second fit
    assert [attempt["step"] for attempt in notes(tmp_path, "attempts", 1)] == [0, 0, 3, 0]
    told = " ".join(finished.output.split())
    assert "no restart: this is fit or evaluation 6 of the program, and a new process begins with the first" in told
    assert told.count("resuming from") == 1


def test_the_verdict_on_a_failure_is_of_that_fit_alone(without_faults: Any, tmp_path: Path) -> None:
    # The last two are at one batch of one epoch, for those who do not count the steps: a new epoch has none at first.
    later = [{**it, "fit": 1} for it in (fault("epoch", rank=0, step=8), fault("validation", step=16))]
    faults = [{**fault("raise", rank=None, step=3, always=True), "fit": 0}, *later]
    finished = train(tmp_path, *faults, fits=2, catches=True, max_restarts=2)
    assert weights(finished) == without_faults, finished.output
    assert finished.output.count("no restart: ") == 1
    assert [attempt["step"] for attempt in notes(tmp_path, "attempts", 1)] == [0, 3, 3, 8, 16]


@pytest.mark.parametrize("fault_of_rank_zero", ["kill", "interrupt"])
def test_the_end_of_rank_zero_and_ctrl_c_end_the_run(fault_of_rank_zero: str, tmp_path: Path) -> None:
    finished = train(tmp_path, fault(fault_of_rank_zero, rank=0, step=3))
    assert finished.returncode != 0
    assert "bucketddp: restart " not in finished.output
    assert len(list((tmp_path / "checkpoints").glob("*.ckpt"))) == 1


# --- Restarts by what has started the ranks, with `auto_resume`


@pytest.mark.long  # that torchrun starts ranks again: tests/startup/test_startup.py
def test_torchrun_starts_all_ranks_again_from_the_newest_checkpoint(without_faults: Any, tmp_path: Path) -> None:
    faults = [fault("kill", step=5), fault("kill", rank=0, step=11)]
    within = (*TORCHRUN, "--max-restarts", "2")
    finished = train(tmp_path, *faults, within=within, max_restarts=0, every=2, rescue=False)
    assert weights(finished) == without_faults
    assert_each_sample_once(tmp_path)
    for rank in range(2):
        assert [attempt["step"] for attempt in notes(tmp_path, "attempts", rank)] == [0, 4, 10]


@pytest.mark.long
@pytest.mark.parametrize("kinds", [["requeue"], ["requeue", "raise"], ["raise", "OSError", "SIGUSR1"]], ids=" ".join)
def test_slurm_requeues_from_where_the_signal_came(kinds: list[str], without_faults: Any, tmp_path: Path) -> None:
    job = slurm_job(num_nodes=1)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    # As SLURM does: the job's processes are killed and it is started again.
    kill = 'kill -9 $(sed \'s/.*"pid": \\([0-9]*\\).*/\\1/\' "$RESULTS"/attempts.*)'
    scontrol.write_text(f'#!/bin/sh\necho "$@" > "$RESULTS/scontrol.txt"\n{kill}\n')
    scontrol.chmod(0o755)
    # To one rank, in the middle of a step: what is saved is the state after it, and all ranks save it.
    # Also if that step fails and is taken again, and in a pause between two attempts.
    plan = json.dumps({"faults": [fault(what, step=7) for what in kinds]})
    num_restarts = len(kinds) - (kinds[0] == "requeue")
    for restart_count in range(2):
        variables = {**job, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_RESTART_COUNT": str(restart_count)}
        tasks = [Program([SCRIPTS / "goes_on.py", plan], {**variables, **slurm_task(rank, 1)}) for rank in range(2)]
        finished = run_together(*tasks, root="lightning.pytorch", directory=tmp_path)
        assert (finished.returncode == 0) == (restart_count == 1), finished.output
    assert (tmp_path / "scontrol.txt").read_text() == f"requeue {job['SLURM_JOB_ID']}\n"
    assert weights(finished) == without_faults
    assert [attempt["step"] for attempt in notes(tmp_path, "attempts", 1)] == [0, *[7] * num_restarts, 8]


# --- With fewer ranks


# A rank that nobody starts again; that it was killed shall not end the others either.
NEVER_FAILS = '"$@"; exit 0'


def train_by_hand(directory: Path, *faults: dict[str, Any], returns: int | None = None, **plan: Any) -> Run:
    """Train as a scheduler starts three ranks; the rank that `returns` is started again at the last fault, rank 0's."""
    directory.mkdir(exist_ok=True)
    text = json.dumps({"faults": faults, "rejoin_s": 8, "batch_size": 4, **plan})
    of_run = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own_port()), "RANKS": "3"}
    starts = [(rank, NEVER_FAILS) for rank in range(3)]
    if returns is not None:
        starts.append((returns, f'until [ -e fault{len(faults) - 1}.0 ]; do sleep 0.1; done; exec "$@"'))
    programs = [
        Program([SCRIPTS / "goes_on.py", text], {**of_run, "LOCAL_RANK": str(rank)}, within=("sh", "-c", within, "sh"))
        for rank, within in starts
    ]
    return run_together(*programs, root="lightning.pytorch", directory=directory)


@pytest.mark.parametrize(
    "options",
    [
        {"global_batch_size": 12, "shard_optimizer": True},
        pytest.param({"local_steps": {"steps": 2, "islands": "rank"}}, marks=pytest.mark.long),
    ],
    ids=lambda it: next(iter(it)),
)
def test_a_run_goes_on_without_a_rank_that_nobody_brings_back(options: dict[str, Any], tmp_path: Path) -> None:
    went_on = train_by_hand(tmp_path / "went_on", fault("kill", step=3), min_ranks=2, every=2, options=options)
    assert "going on with 2 of 3 ranks" in went_on.output, went_on.output
    assert "Nobody has brought rank 1 back." in went_on.output
    assert "pass `global_batch_size`" not in went_on.output or "global_batch_size" not in options
    ends = [went_on.results[f"end.rank{rank}"] for rank in range(2)]
    assert [end["world_size"] for end in ends] == [2, 2]
    assert ends[0]["weights"] == ends[1]["weights"]
    begun_at = [attempt["step"] for attempt in notes(tmp_path / "went_on", "attempts", 0)]
    if "local_steps" not in options:  # state that is divided is in regular checkpoints only
        assert begun_at == [0, 2]
    # Two ranks that are started with the same checkpoint end alike.
    [path] = re.findall(r"resuming from\s+`(.*?)`", went_on.output)
    resumed = train(tmp_path / "resumed", ranks=2, batch_size=4, ckpt_path=path, options=options)
    assert weights(resumed) == ends[0]["weights"], resumed.output
    assert resumed.results["end.rank0"]["steps"] == ends[0]["steps"]


def test_a_script_goes_on_alone_without_a_rank_whose_new_process_fails_as_well(tmp_path: Path) -> None:
    faults = [fault("kill", step=3), fault("raise", rank=0, step=6)]
    finished = train(tmp_path, *faults, min_ranks=1, rejoin_s=8, every=4, stays_away=True, combines=True)
    assert "takes the place of rank 1" in finished.output, finished.output
    assert "going on with 1 of 2 ranks" in finished.output
    assert "pass `global_batch_size`" in finished.output
    assert finished.returncode == 0
    assert [attempt["step"] for attempt in notes(tmp_path, "attempts", 0)] == [0, 3, 6]
    # Of 16 batches of an epoch, the two ranks have trained on six.
    assert [finished.results["end.rank0"][what] for what in ("world_size", "steps")] == [1, 3 + 10 + 16]


def test_a_run_does_not_go_on_with_fewer_ranks_than_it_needs(tmp_path: Path) -> None:
    ended = train_by_hand(tmp_path, fault("kill", step=3), min_ranks=3)
    assert "Rank 1 of 3 did not join" in ended.output, ended.output
    assert "The run needs 3 of them (`min_ranks`)." in ended.output
    assert "lightning_bucketddp/" not in ended.output  # no frames of ours
    assert ended.output.count("bucketddp: restart ") == 1
    assert not ended.results
    # What was begun again, and has not loaded anything, is not saved.
    [saved] = (tmp_path / "checkpoints").iterdir()
    assert torch.load(saved, weights_only=True)["global_step"] == 3


def test_a_rank_that_comes_back_is_taken_in_after_a_checkpoint(tmp_path: Path) -> None:
    faults = [fault("kill", step=3), fault("await", rank=0, step=5)]
    finished = train_by_hand(tmp_path, *faults, returns=1, min_ranks=2, every=4)
    assert "going on with 3 of 3 ranks" in finished.output, finished.output
    assert [finished.results[f"end.rank{rank}"]["world_size"] for rank in range(3)] == [3, 3, 3]
    attempts = notes(tmp_path, "attempts", 0)
    assert [attempt["step"] for attempt in attempts] == [0, 3, 8]
    assert len({attempt["pid"] for attempt in attempts}) == 1


def test_survivors_wait_for_a_rank_zero_that_is_started_again(tmp_path: Path) -> None:
    finished = train_by_hand(tmp_path / "with", fault("kill", rank=0, step=3), returns=0, rejoin_s=200)
    without = train_by_hand(tmp_path / "without")
    assert weights(finished) == weights(without), finished.output
    attempts = [notes(tmp_path / "with", "attempts", rank) for rank in range(3)]
    assert [[attempt["step"] for attempt in of_rank] for of_rank in attempts] == [[0, 3]] * 3
    assert [len({attempt["pid"] for attempt in of_rank}) for of_rank in attempts] == [2, 1, 1]


def test_a_survivor_makes_a_store_in_place_of_one_that_nobody_brings_back(tmp_path: Path) -> None:
    faults = [fault("kill", rank=0, step=3), fault("raise", rank=1, step=6)]
    went_on = train_by_hand(tmp_path / "went_on", *faults, min_ranks=2, batch_size=4)
    assert re.search(r"rank [12] makes a new store at 127\.0\.0\.1:\d+\.", went_on.output), went_on.output
    assert "Nobody has brought rank 0 back." in went_on.output
    ends = [went_on.results[f"end.rank{rank}"] for rank in range(2)]
    assert [end["world_size"] for end in ends] == [2, 2]
    # The two that are left are numbered anew, and go on in the new store after a further failure.
    assert [attempt["step"] for attempt in notes(tmp_path / "went_on", "attempts", 0)] == [0, 3, 6]
    first, *_ = re.findall(r"resuming from\s+`(.*?)`", went_on.output)
    resumed = train(tmp_path / "resumed", ranks=2, batch_size=4, ckpt_path=first)
    assert weights(resumed) == ends[0]["weights"] == ends[1]["weights"], resumed.output


def train_on_two_hosts(directory: Path, plan: dict[str, Any], *, within: str, local_ranks: list[int | None]) -> Run:
    """Train on two hosts, of which each starts these ranks, or a program that starts its own (None)."""
    with two_hosts() as hosts:
        # The number of threads is what Lightning sets where two ranks share a machine.
        of_run = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(own_port()), "NODES": "2", "OMP_NUM_THREADS": "1"}
        programs = [
            Program(
                [SCRIPTS / "goes_on.py", json.dumps(plan)],
                {**of_run, "NODE_RANK": str(node), **({} if rank is None else {"LOCAL_RANK": str(rank), "RANKS": "4"})},
                within=[*host.within, "sh", "-c", within, "sh"],
            )
            for node, host in enumerate(hosts)
            for rank in local_ranks
        ]
        return run_together(*programs, root="lightning.pytorch", directory=directory)


@pytest.mark.long
def test_a_new_store_is_found_by_the_ranks_of_another_host(tmp_path: Path) -> None:
    plan = {"faults": [fault("kill", rank=0, step=3)], "rejoin_s": 8, "batch_size": 4, "min_ranks": 3}
    finished = train_on_two_hosts(tmp_path, plan, within=NEVER_FAILS, local_ranks=[0, 1])
    assert "rank 1 makes a new store at " in finished.output, finished.output
    assert "going on with 3 of 4 ranks" in finished.output
    ends = [finished.results[f"end.rank{rank}"] for rank in range(3)]
    assert [end["world_size"] for end in ends] == [3, 3, 3]
    assert ends[0]["weights"] == ends[1]["weights"] == ends[2]["weights"]


def test_a_host_that_is_started_again_is_taken_in(without_faults: Any, tmp_path: Path) -> None:
    plan = {"faults": [fault("kill", step=3), fault("raise", rank=0, step=6)]}
    finished = train_on_two_hosts(tmp_path, plan, within='"$@" || "$@"', local_ranks=[None])
    assert weights(finished) == without_faults, finished.output
    attempts = [notes(tmp_path, "attempts", rank) for rank in range(2)]
    assert [[attempt["step"] for attempt in of_rank] for of_rank in attempts] == [[0, 3, 6]] * 2
    assert [len({attempt["pid"] for attempt in of_rank}) for of_rank in attempts] == [1, 2]
    assert_each_sample_once(tmp_path)


@pytest.mark.parametrize("num_restarts", [5, pytest.param(50, marks=pytest.mark.long)])
def test_restarts_are_counted_and_nothing_grows_with_them(num_restarts: int, tmp_path: Path) -> None:
    faults = [fault("raise", rank=(num_restarts + step) % 2, step=step) for step in range(1, num_restarts + 2)]
    finished = train(tmp_path, *faults, max_restarts=num_restarts, epochs=num_restarts // 8 + 1, workers=1)
    assert finished.returncode != 0
    assert f"no restart: `max_restarts`, {num_restarts}, is reached" in finished.output, finished.output
    assert "[rank1]: ValueError: by chance: raise" in finished.output
    assert "[rank1]: [rank1]: " not in finished.output
    for rank in range(2):
        attempts = notes(tmp_path, "attempts", rank)
        assert [attempt["step"] for attempt in attempts] == list(range(num_restarts + 1))
        # The first few bring what every later one has: caches, lazily imported modules.
        settled, last = attempts[3], attempts[-1]
        for what in ("threads", "files", "children", "handlers"):
            assert last[what] == settled[what], (what, [attempt[what] for attempt in attempts])
        growth = (last["memory"] - settled["memory"]) / (len(attempts) - 4)
        # In a few restarts a heap that is not reused at once would look like growth.
        assert growth < 2**20 * (1 if num_restarts > 10 else 8), [attempt["memory"] >> 20 for attempt in attempts]


def test_a_module_is_put_back_to_what_fit_was_called_with() -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    module[1].factor, module.losses, rows = 1.0, {"train": deque([1]), "names": {"a"}}, [0] * 1001
    module.rows, losses, callback = rows, module.losses, SimpleNamespace(best=None, module=module)
    module.register_buffer("seen", torch.zeros(2), persistent=False)
    module[1].eval()
    module[0].bias.requires_grad = False
    loop = SimpleNamespace(max_epochs=3)
    trainer = SimpleNamespace(lightning_module=module, callbacks=[callback], datamodule=None, fit_loop=loop)
    trainer.accumulate_grad_batches = 2
    at_start = StateAtStart(trainer)
    trainer.accumulate_grad_batches, loop.max_epochs = 4, 9
    module.eval()
    module.requires_grad_(True)
    module.seen += 3
    module[0].weight.grad = torch.ones(2, 2)
    module[0].new, callback.best = 1, 0.5
    module.rows = None
    for _ in range(2):  # what is put back is not shared with what was kept
        at_start.restore()
        assert [it.training for it in module.modules()] == [True, True, False]
        assert [param.requires_grad for param in module.parameters()] == [True, False]
        assert module.seen.tolist() == [0, 0]
        assert module[0].weight.grad is None
        assert (trainer.accumulate_grad_batches, loop.max_epochs) == (2, 3)
        assert not hasattr(module[0], "new")
        assert callback == SimpleNamespace(best=None, module=module)
        assert module.losses is losses
        assert losses == {"train": deque([1]), "names": {"a"}}
        assert module[1].factor == 1
        assert module.rows is rows
        module.seen += 3
        module[1].factor, module.losses = 2, {}
        losses["train"].append(2)
        losses.update(names=set(), test=[])
