"""When one rank raises, dies or is stuck, all end in seconds and name it."""

from __future__ import annotations

import inspect
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_bucketddp.config import Timeouts
from lightning_bucketddp.faults.heartbeat import Heartbeat, HeartbeatMonitor
from lightning_bucketddp.faults.progress import Progress
from lightning_bucketddp.faults.side_channel import SideChannel
from tests.support.doomed_ranks import Ended, doomed_ranks
from tests.support.host_faults import HostFault, kill, let_happen
from tests.support.hosts import hosts_on_a_switch
from tests.support.scripts.faults import LINGERING_S, Fault, fit

# Far from the time-out of the groups, which is half an hour; the measured times are in benchmarks/results.
SOON_S = 20


def end_of(directory: Path, *, world_size: int = 2, may_end_well: bool = False, **options: Any) -> Ended:
    """Let a fit go wrong and wait until every rank is gone, soon after it did."""
    with doomed_ranks(fit, directory=directory, world_size=world_size, **options) as ranks:
        ended = ranks.wait()
    assert ended.at - ended.results["fault"]["at"] < SOON_S
    assert may_end_well or 0 not in ended.exit_codes
    return ended


def assert_saved_as_seen(ended: Ended, directory: Path, *, by: int = 0) -> None:
    """Assert that the callbacks that save on exceptions have saved what rank `by` had when it failed."""
    seen = ended.results[f"seen{by}"]
    can_save_on_exception = "save_on_exception" in inspect.signature(ModelCheckpoint).parameters  # Lightning 2.6
    by_model_checkpoint = list((directory / "saved").glob("*.ckpt"))
    assert len(by_model_checkpoint) == can_save_on_exception
    for path in (*by_model_checkpoint, directory / "on_exception" / "on_exception.ckpt"):
        checkpoint = torch.load(path, weights_only=True)
        assert checkpoint["global_step"] == seen["step"]
        # What the forward of a batch has changed goes with its step.
        assert checkpoint["state_dict"]["layers.1.num_batches_tracked"] == seen["step"]
        weights = [w for name, w in checkpoint["state_dict"].items() if "running" not in name and "num_b" not in name]
        assert [w.flatten().tolist() for w in weights if w.dim()] == seen["weights"]


@pytest.mark.parametrize("where", ["training_step", "on_after_backward", "on_train_batch_end"])
def test_exception_of_one_rank_ends_all_and_saves_the_step_that_failed(where: str, tmp_path: Path) -> None:
    ended = end_of(tmp_path, fault=Fault("raise", where), world_size=3)
    assert ended.exit_codes == [1, 1, 1]
    assert ended.results["seen1"]["type"] == "ValueError"
    for rank in (0, 2):
        seen = ended.results[f"seen{rank}"]
        assert seen["type"] == "RankFailedError"
        assert "Rank 1 (process" in seen["message"]
        assert "ValueError: boom" in seen["message"]
        assert "epoch 0" in seen["message"]
        assert not seen["has_group"]
    # Rank zero has taken the step of batch 3 where the exception came after its gradients were exchanged.
    assert ended.results["seen0"]["step"] == (3 if where == "training_step" else 4)
    assert_saved_as_seen(ended, tmp_path)


def test_a_resumed_run_tells_whose_random_numbers_are_lost(tmp_path: Path) -> None:
    end_of(tmp_path, fault=Fault("raise"), rank_seeds=True)
    path = tmp_path / "on_exception" / "on_exception.ckpt"
    options: dict[str, Any] = {"rank_seeds": True, "num_batches": 5, "ckpt_path": path}
    with doomed_ranks(fit, directory=tmp_path, **options) as ranks:
        ended = ranks.wait()
    assert ended.exit_codes == [0, 0], ended.output
    said = " ".join(ended.output[0].split())
    assert "rank 0 saved the checkpoint alone, because rank 1 had failed. The random state of rank 1 is" in said
    assert re.search(r"numbers begin there, from seed \d+ and step 3: \d+ on rank 1; rank 0 goes on", said)


def test_exception_of_rank_zero_ends_all(tmp_path: Path) -> None:
    ended = end_of(tmp_path, fault=Fault("raise in a library", rank=0))
    assert ended.results["seen0"]["type"] == "ValueError"
    assert "Rank 0 (process" in ended.results["seen1"]["message"]
    stack = ended.results["seen1"]["stack"]
    assert re.search(r"in training_step\n.*in happen\n.* more \.\.\.\n.*in forward\n", stack, re.DOTALL), stack
    assert_saved_as_seen(ended, tmp_path)


@pytest.mark.parametrize(
    ("where", "options"),
    [("validation_step", {"val_check_interval": 2}), ("setup", {}), ("data worker", {"num_workers": 1})],
)
def test_exception_outside_of_training_ends_all(where: str, options: dict[str, Any], tmp_path: Path) -> None:
    ended = end_of(tmp_path, fault=Fault("raise", where), **options)
    if where != "setup":  # before there are optimizers for the witness to look at
        assert "ValueError" in ended.results["seen1"]["type"] + ended.results["seen1"]["message"]
    assert "Rank 1 (process" in ended.output[0]
    assert "boom" in ended.output[0]


def test_ranks_that_raised_together_keep_their_group_and_wait_for_each_other(tmp_path: Path) -> None:
    ended = end_of(tmp_path, fault=Fault("raise", rank=None), lingers_on=0)
    first, second = (ended.results[f"seen{rank}"] for rank in (0, 1))
    assert first["type"] == second["type"] == "ValueError"
    assert first["has_group"]
    assert second["has_group"]
    assert abs(second["at"] - first["at"]) < LINGERING_S / 2
    assert_saved_as_seen(ended, tmp_path)


def test_nobody_waits_for_a_rank_whose_callbacks_take_long(tmp_path: Path) -> None:
    with doomed_ranks(fit, directory=tmp_path, fault=Fault("raise"), world_size=3, lingers_on=1) as ranks:
        ended = ranks.wait()
    lingering = ended.results["seen1"]["at"]
    assert all(lingering - ended.results[f"seen{rank}"]["at"] > LINGERING_S / 2 for rank in (0, 2))
    assert all(ended.results[f"seen{rank}"]["type"] == "RankFailedError" for rank in (0, 2))


@pytest.mark.parametrize(
    ("what", "rank", "said"),
    [
        ("SIGKILL", 1, "killed by signal 9 (SIGKILL)"),
        ("SIGKILL", 0, "killed by signal 9 (SIGKILL)"),
        ("exit", 1, "ended with exit status 0 in the middle of the run"),
    ],
)
def test_death_of_one_rank_ends_the_others(what: str, rank: int, said: str, tmp_path: Path) -> None:
    ended = end_of(tmp_path, fault=Fault(what, rank=rank), world_size=3, may_end_well=what == "exit")
    for other in {0, 1, 2} - {rank}:
        seen = ended.results[f"seen{other}"]
        assert seen["type"] == "RankFailedError"
        assert f"Rank {rank} (process {ended.results['fault']['pid']}" in seen["message"]
        assert said in seen["message"] or "only its parent process knows" in seen["message"]
        assert ended.exit_codes[other] == 1
    saver = 0 if rank != 0 else 1
    assert_saved_as_seen(ended, tmp_path, by=saver)
    assert [ended.results[f"seen{r}"]["is_global_zero"] for r in {0, 1, 2} - {rank}] == [True, False]


def test_death_of_rank_zero_before_a_save_is_not_taken_for_a_save_of_one_rank(tmp_path: Path) -> None:
    """With it goes the store, where the other rank waits for all to save."""
    ended = end_of(tmp_path, fault=Fault("SIGKILL", "on_save_checkpoint", rank=0), save_every=1)
    assert ended.results["seen1"]["type"] == "RankFailedError"
    assert f"Rank 0 (process {ended.results['fault']['pid']}" in ended.results["seen1"]["message"]


@pytest.mark.parametrize(
    ("what", "rank"),
    [("sleep in a library", 0), *(pytest.param("SIGSTOP", rank, marks=pytest.mark.long) for rank in (0, 1))],
)
def test_stuck_rank_is_named_and_ends_with_the_others(what: str, rank: int, tmp_path: Path) -> None:
    ended = end_of(tmp_path, fault=Fault(what, rank=rank), timeout_s=8, timeouts=Timeouts(stall_warning_s=1))
    waiting = 1 - rank
    said = ended.output[waiting]
    assert len(re.findall(rf"rank {waiting} has waited \d+ s for other ranks in backward of batch 3", said)) == 1
    assert f"Rank {rank} " in said
    assert "RankFailedError" in said
    if what == "SIGSTOP":
        assert "its process is stopped" in said
        assert ended.exit_codes[rank] == -signal.SIGKILL
        assert_saved_as_seen(ended, tmp_path, by=waiting if rank == 0 else 0)
    else:
        assert "forward of batch 3 in epoch 0" in said
        assert "in happen" in said  # the user's part of its stack
        assert ended.results[f"seen{rank}"]["type"] == "RankFailedError"
        assert_saved_as_seen(ended, tmp_path)  # by rank zero, also where it was the one that was stuck


def test_stuck_data_worker_is_seen_and_ends_with_the_others(tmp_path: Path) -> None:
    ended = end_of(
        tmp_path, fault=Fault("sleep", "data worker"), num_workers=1, timeouts=Timeouts(stall_warning_s=1, stall_s=4)
    )
    assert re.search(r"Rank 1 .*is stuck in data loading( after batch \d in epoch 0)?:", ended.output[0])
    assert ended.results["seen1"]["type"] == "RankFailedError"
    assert not Path("/proc", str(ended.results["fault"]["pid"])).exists()


@pytest.mark.parametrize("reduce_dtype", [None, pytest.param("int8", marks=pytest.mark.long)])
def test_rank_behind_in_backward_is_named_with_its_bucket(reduce_dtype: str | None, tmp_path: Path) -> None:
    fault = Fault("sleep", "backward")
    ended = end_of(tmp_path, fault=fault, timeout_s=8, timeouts=Timeouts(stall_warning_s=1), reduce_dtype=reduce_dtype)
    where = (
        r"backward of batch 3 in epoch 0, before bucket 0 of 3 \(`layers\.2\.bias`, `layers\.2\.weight`, `layers\.1\."
    )
    assert re.search(where, ended.output[0]), ended.output[0]


@contextmanager
def waiting(**timeouts: float) -> Iterator[tuple[HeartbeatMonitor, Callable[..., None]]]:
    """Yield the monitor of rank 0, which has waited for ten seconds, and a function that sends heartbeats of rank 1."""
    store = HashStore()
    here, there = (SideChannel(store, name="run", rank=rank, world_size=2) for rank in (0, 1))
    with closing(here), closing(there):
        progress = Progress(waiting_in=(__file__,))
        progress.follow_this_thread()
        progress.since -= 10

        def beat(**entries: Any) -> None:
            there.set("beat/1", asdict(Heartbeat(where="validation", process="", addresses="", **entries)))

        yield HeartbeatMonitor(here, progress, **timeouts), beat


def test_rank_that_was_heard_a_moment_ago_is_not_taken_for_dead() -> None:
    with waiting(warn_after_s=0.1, timeout_s=1) as (monitor, beat):
        beat(count=1, seconds=10.0, waits=False)
        assert monitor.find_failure() is None
        assert monitor.wait.heard is not None
        threading.Timer(0.5, beat, kwargs={"count": 2, "seconds": 10.0, "waits": False}).start()
        [behind] = monitor.find_stragglers()
        assert behind.what == "it has been there for 10 s"


def test_rank_that_stands_still_ends_the_run_long_before_the_time_out_and_one_that_waits_warns(tmp_path: Path) -> None:
    ended = end_of(tmp_path, fault=Fault("sleep"), world_size=3, timeouts=Timeouts(stall_warning_s=1, stall_s=4))
    warnings = re.findall(r"has waited \d+ s for other ranks in backward of batch 3", "".join(ended.output))
    assert len(warnings) == 1
    for rank in range(3):
        assert ended.results[f"seen{rank}"]["type"] == "RankFailedError"
        said = ended.results[f"seen{rank}"]["message"]
        assert re.search(r"Rank 1 \(process \d+ on .*\) is stuck in forward of batch 3 in epoch 0: it has been", said)
        assert "; the others have waited for longer than `stall_s`, 4 s.\nIts stack, innermost call last:" in said
        assert "in happen" in said  # the user's part of its stack
    assert_saved_as_seen(ended, tmp_path)


def test_rank_that_goes_from_phase_to_phase_does_not_stand_still_nor_one_that_waits_too() -> None:
    with waiting(warn_after_s=10, timeout_s=100, stall_timeout_s=0.1) as (monitor, beat):
        assert monitor.find_failure() is None
        time.sleep(0.2)
        for number, (seconds, waits) in enumerate([(0.05, False), (50.0, True), (50.0, False)]):
            stalled = monitor.find_failure()
            assert stalled is None
            beat(count=number, seconds=seconds, waits=waits)
            monitor.wait.next_check = 0.0
        stalled = monitor.find_failure()
        assert stalled is not None
        assert stalled.describe().startswith(
            "Rank 1 is stuck in validation: it has been there for 50 s; the others have"
        )
        monitor.progress.enter("forward")  # it waits no more
        assert monitor.find_failure() is None


# --- With a sharded optimizer


LOST = "is not saved: the other ranks cannot be reached any more, and each of them has a part of the optimizers' state"


# It has stepped its own shard of the weights.
PARTIAL = "is not saved, because a rank was lost while gradients or weights were being exchanged"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("raise", "optimizer", rank=0), PARTIAL),
        (Fault("raise", "on_train_batch_end", rank=0), LOST),
        (Fault("SIGKILL", "on_train_batch_end"), LOST),
    ],
    ids=["rank_zero_raises_in_its_step", "rank_zero_raises", "another_dies"],
)
def test_a_checkpoint_without_the_shard_of_a_lost_rank_is_not_written(
    fault: Fault, reason: str, tmp_path: Path
) -> None:
    ended = end_of(tmp_path, fault=fault, shard_optimizer=True, save_every=2)
    assert not (tmp_path / "on_exception" / "on_exception.ckpt").exists()
    assert reason in " ".join(ended.output[0].split())
    # The one that was saved before is all of it.
    [saved] = (tmp_path / "saved").glob("*.ckpt")
    checkpoint = torch.load(saved, weights_only=True)
    assert checkpoint["global_step"] in (2, 4)
    state = checkpoint["optimizer_states"][0]["state"]
    shapes = [weights.shape for name, weights in checkpoint["state_dict"].items() if name.endswith(("weight", "bias"))]
    assert [state[i]["exp_avg"].shape for i in range(len(shapes))] == shapes


def test_ranks_that_fail_together_save_all_of_it(tmp_path: Path) -> None:
    end_of(tmp_path, fault=Fault("raise", rank=None), shard_optimizer=True)
    checkpoint = torch.load(tmp_path / "on_exception" / "on_exception.ckpt", weights_only=True)
    assert all(state["exp_avg"].any() for state in checkpoint["optimizer_states"][0]["state"].values())
    assert len(checkpoint["optimizer_states"][0]["state"]) == 6


# --- On several hosts; see test_hosts.py


def test_a_rank_that_dies_alone_on_its_host_is_named_by_the_others(tmp_path: Path) -> None:
    with hosts_on_a_switch(1):  # or skip
        [end] = let_happen({"kill": HostFault(num_hosts=2, happens=kill(1))}, tmp_path).values()
    ended = end.ended
    message = ended.results["seen0"]["message"]
    assert "Rank 1 (process " in message
    assert "on host2) can no longer be reached: its connection broke; it was last heard of in" in message
    assert ended.exit_codes == [1, -signal.SIGKILL]
