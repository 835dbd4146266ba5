"""A user's own collectives, questions to the strategy, and loggers: as with `ddp`, on two processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.ports import own_port
from tests.support.ranks import RankPool, run_on_ranks
from tests.support.scripts.interplay import ask, log, talk, train_over_backend

has_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)


@pytest.mark.parametrize("module", ["talkative", "contrastive"])
def test_collectives_of_the_user_among_ours_equal_ddp(module: str) -> None:
    ours = run_on_ranks(talk, module=module, like_ddp=False)
    ddp = run_on_ranks(talk, module=module, like_ddp=True)
    assert ours == ddp
    assert ours[0]["weights"] == ours[1]["weights"]


def test_strategy_and_trainer_answer_as_with_ddp() -> None:
    ours = run_on_ranks(ask, strategy="bucketddp")
    assert ours == run_on_ranks(ask, strategy="ddp")
    assert ours[0]["mean"] == [1.5, 5.0]


@pytest.mark.parametrize("logger", ["csv", pytest.param("tensorboard", marks=has_tensorboard)])
def test_log_files_are_those_of_ddp(logger: str, tmp_path: Path) -> None:
    ours = run_on_ranks(log, strategy="bucketddp", logger=logger, directory=tmp_path / "ours")
    ddp = run_on_ranks(log, strategy="ddp", logger=logger, directory=tmp_path / "ddp")
    assert ours == ddp
    assert ours[0]["values"]
    assert len(list((tmp_path / "ours").rglob("version_*"))) == 1


def test_a_process_group_backend_of_the_user_is_used() -> None:
    pool = RankPool(2, "gloo")
    try:
        in_use = {
            backend: pool.run(train_over_backend, 60, {"backend": backend, "ports": [own_port(), own_port()]})
            for backend in ("gloo", "cpu:gloo")
        }
    finally:
        pool.close()
    for rank in (*in_use["gloo"], *in_use["cpu:gloo"]):
        assert rank["BucketDDPStrategy"] == rank["DDPStrategy"]
    for backends, _ in (rank["BucketDDPStrategy"] for rank in in_use["cpu:gloo"]):
        assert backends == "cpu:gloo"
