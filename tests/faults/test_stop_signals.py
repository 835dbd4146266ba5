"""SIGTERM and SIGINT, to one process or to all, at any moment: all stop, soon, and nothing is lost but a step."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.faults.failure import Failure, RankFailedError
from lightning_bucketddp.faults.progress import Progress
from tests.support.doomed_ranks import Ended, doomed_ranks
from tests.support.scripts.faults import Fault, fit
from tests.support.scripts.models import Regression, loader
from tests.support.scripts.trainers import make_trainer

SOON_S = 20
SEEN_AS = {signal.SIGTERM: "SIGTERMException", signal.SIGINT: "KeyboardInterrupt"}
EXIT_CODE_OF = {signal.SIGTERM: 143, signal.SIGINT: 1}


def checkpoint_of(directory: Path) -> dict[str, Any]:
    return torch.load(directory / "on_exception" / "on_exception.ckpt", weights_only=True)


def end_of(directory: Path, fault: Fault, *, number: int = 0, targets: tuple[int, ...] = (), **options: Any) -> Ended:
    """Let a fit meet `fault`; then send signal `number` to `targets`, when other ranks wait for the faulty one."""
    with doomed_ranks(fit, directory=directory, fault=fault, **options) as ranks:
        if targets:
            ranks.wait_for("fault.json")
            time.sleep(1.5)  # by now they wait, where no handler can run
        for rank in targets:
            ranks.send(rank, number)
        return ranks.wait()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", SEEN_AS)
@pytest.mark.sampled(2)
def test_signal_to_one_rank_stops_all_after_the_same_step(number: signal.Signals, rank: int, tmp_path: Path) -> None:
    ended = end_of(tmp_path, Fault(number.name, rank=rank), world_size=3)
    assert ended.exit_codes == [EXIT_CODE_OF[number]] * 3
    seen = [ended.results[f"seen{r}"] for r in range(3)]
    assert {one["type"] for one in seen} == {SEEN_AS[number]}
    # The step in which the signal came is complete on all, so no rank needs to leave the others.
    assert [one["step"] for one in seen] == [4, 4, 4]
    assert all(one["has_group"] for one in seen)
    assert seen[0]["weights"] == seen[1]["weights"] == seen[2]["weights"]
    assert checkpoint_of(tmp_path)["global_step"] == 4
    assert f"rank {rank} received {number.name}" in ended.output[rank]


@pytest.mark.parametrize("how", ["Ctrl-C, noticed late by rank 1", "Ctrl-C, passed on by the parent"])
def test_one_ctrl_c_that_comes_in_two_ways_stops_after_a_step(how: str, tmp_path: Path) -> None:
    ended = end_of(tmp_path, Fault(how, rank=None))
    assert [ended.results[f"seen{rank}"]["step"] for rank in (0, 1)] == [4, 4], ended.output
    assert checkpoint_of(tmp_path)["global_step"] == 4


def test_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    ended = end_of(tmp_path, Fault("Ctrl-C twice", rank=None))
    assert [ended.results[f"seen{rank}"]["step"] for rank in (0, 1)] == [3, 3], ended.output


def test_signal_in_a_long_step_costs_that_step(tmp_path: Path) -> None:
    ended = end_of(tmp_path, Fault("SIGTERM"), pause_s=60, slow_from=3)
    assert ended.at - ended.results["fault"]["at"] < SOON_S
    assert ended.exit_codes == [143, 143]
    assert checkpoint_of(tmp_path)["global_step"] == 3


@pytest.mark.parametrize(
    ("fault", "number", "targets", "options"),
    [
        *[(Fault("sleep"), number, (0,), {}) for number in SEEN_AS],
        *[
            pytest.param(Fault("sleep", where), number, (0,), options, marks=pytest.mark.long)
            for where, options in (("data worker", {"num_workers": 1}), ("validation_step", {"val_check_interval": 4}))
            for number in SEEN_AS
        ],
        # Ranks wait in collectives that do not match.
        *[(Fault("collective", rank=0), signal.SIGINT, targets, {}) for targets in ((0,), (1,), (0, 1))],
    ],
    ids=lambda value: value.where if isinstance(value, Fault) else None,
)
@pytest.mark.sampled(2)
def test_signal_to_a_rank_that_waits_for_another_one_in_a_collective(
    fault: Fault, number: signal.Signals, targets: tuple[int, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    ended = end_of(tmp_path, fault, number=number, targets=targets, **options)
    assert ended.exit_codes == [EXIT_CODE_OF[number]] * 2, ended.output
    assert {ended.results[f"seen{rank}"]["type"] for rank in (0, 1)} == {SEEN_AS[number]}
    assert any(f"rank {rank} received {number.name}; all ranks stop." in ended.output[rank] for rank in targets)
    assert checkpoint_of(tmp_path)["global_step"] == ended.results["seen0"]["step"]


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.sampled(1)
def test_ctrl_c_before_the_first_step_while_others_wait_at_a_barrier(target: int, tmp_path: Path) -> None:
    ended = end_of(tmp_path, Fault("sleep", "setup"), number=signal.SIGINT, targets=(target,))
    assert 0 not in ended.exit_codes
    assert not any("finished" in name for name in ended.results)


def test_sigint_that_was_ignored_before_stays_ignored(tmp_path: Path) -> None:
    ended = end_of(tmp_path, Fault("SIGINT", rank=0), ignores_sigint=True, num_batches=40)
    assert ended.exit_codes == [0, 0], ended.output
    assert {"finished0", "finished1"} <= ended.results.keys()


def fit_twice(*, directory: Path) -> None:
    press = LambdaCallback(on_train_end=lambda *_: os.kill(os.getpid(), signal.SIGINT))
    for number in range(2):
        trainer = make_trainer(BucketDDPStrategy(), devices=2, max_epochs=1, callbacks=[press])
        trainer.fit(Regression(), loader())
        (directory / f"fit{number}.rank{trainer.global_rank}.json").write_text("{}")


def test_ctrl_c_at_the_end_of_a_fit_ends_the_program(tmp_path: Path) -> None:
    with doomed_ranks(fit_twice, directory=tmp_path) as ranks:
        ended = ranks.wait()
    assert ended.exit_codes == [1, 1], ended.output
    assert not [name for name in ended.results if name.startswith("fit")]


def test_signal_waits_for_the_end_of_an_optimizers_step(tmp_path: Path) -> None:
    ended = end_of(tmp_path, Fault("SIGTERM and sleep", "optimizer", rank=None))
    checkpoint = checkpoint_of(tmp_path)
    # Ended in the middle, the optimizer would have taken a step that the trainer has not counted.
    assert checkpoint["optimizer_states"][0]["state"][0]["step"] == checkpoint["global_step"] >= 4
    assert ended.exit_codes == [143, 143]


def fit_with_signal_in_failure(*, moment: str, **options: Any) -> None:
    """Train; a rank that ends because another one has failed receives SIGTERM before the watchdog knows its error."""
    owner: Any = Failure if moment == "of" else Progress
    called = getattr(owner, moment)

    def signalled(*args: Any, **kwargs: Any) -> Any:
        if isinstance(sys.exc_info()[1], RankFailedError):
            os.kill(os.getpid(), signal.SIGTERM)  # as torchrun sends it
        return called(*args, **kwargs)

    setattr(owner, moment, signalled)
    fit(**options)


@pytest.mark.parametrize("moment", ["of", "describe"])
def test_a_signal_while_a_failure_is_being_told_spoils_no_checkpoint(moment: str, tmp_path: Path) -> None:
    fault = Fault("raise on rank 1, sleep on rank 0", "training_step", rank=None)
    with doomed_ranks(fit_with_signal_in_failure, moment=moment, directory=tmp_path, fault=fault) as ranks:
        ended = ranks.wait()
    assert ended.results["seen0"]["type"] == "RankFailedError", ended.output
    assert checkpoint_of(tmp_path)["global_step"] == ended.results["seen0"]["step"] == 3


def stop_at_random_moment(number: signal.Signals, targets: tuple[int, ...], delay_s: float, directory: Path) -> None:
    """Send a signal to some ranks of a training that also validates and saves: it loses a step at most."""
    directory.mkdir()
    with doomed_ranks(fit, directory=directory, pause_s=0.01, val_check_interval=20, save_every=7) as ranks:
        ranks.wait_for("training.json")
        time.sleep(delay_s)
        for rank in targets:
            ranks.send(rank, number)
        sent_at = time.time()
        ended = ranks.wait()
    assert ended.at - sent_at < SOON_S
    told = f"{number!r} to {targets} after {delay_s}: {ended.exit_codes}\n{ended.output[0]}\n{ended.output[1]}"
    assert 0 not in ended.exit_codes, told
    assert {"seen0", "seen1"} <= ended.results.keys(), told
    assert {ended.results[f"seen{rank}"]["type"] for rank in (0, 1)} == {SEEN_AS[number]}, told
    saved_step = checkpoint_of(directory)["global_step"]
    assert saved_step == ended.results["seen0"]["step"], told
    completed = max(ended.results[f"progress{rank}"]["step"] for rank in (0, 1))
    assert completed - saved_step <= 1, told


@pytest.mark.long
def test_signals_at_random_moments(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # shown when it fails
    chance = random.Random(seed)
    # Two at once: the processes wait most of the time.
    with ThreadPoolExecutor(2) as executor:
        trials = [
            executor.submit(
                stop_at_random_moment,
                chance.choice([signal.SIGTERM, signal.SIGINT]),
                chance.choice([(0,), (1,), (0, 1)]),
                chance.uniform(0, 0.6),
                tmp_path / str(index),
            )
            for index in range(24)
        ]
        for trial in trials:
            trial.result()
