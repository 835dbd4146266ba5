"""A strategy without a Trainer or Fabric: its environment is set up, and its collectives work."""

from __future__ import annotations

import pytest
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from tests.support.ranks import run_on_ranks
from tests.support.scripts.bare_strategies import ROOTS, make_strategy, talk, talk_in_launched_processes

ANSWERS = {
    "sum": [3.0],
    "mean": [1.5],
    "gathered": [[1.0, 1.0], [1.0, 1.0]],
    "gradient": [1.0, 1.0],
    "broadcast": {"from": 1},
}


@pytest.mark.parametrize("root", ROOTS)
def test_its_collectives_work_in_processes_of_another_launcher(root: str) -> None:
    assert run_on_ranks(talk_in_launched_processes, root=root) == [ANSWERS] * 2


@pytest.mark.long
def test_lightnings_own_launcher_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "")  # set to something first, so that what Lightning sets is undone
    monkeypatch.delenv("MASTER_PORT")
    strategy = make_strategy("lightning.pytorch", "LightningEnvironment", start_method="spawn")
    assert _MultiProcessingLauncher(strategy=strategy).launch(talk, strategy) == ANSWERS
