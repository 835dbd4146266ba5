"""A strategy without a Trainer or Fabric: its environment is set up, and its collectives work."""

from __future__ import annotations

import os
from importlib import import_module
from multiprocessing import spawn
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from lightning_bucketddp.bindings.registration import strategy_class
from tests.support import warm
from tests.support.cases import for_each
from tests.support.ranks import on_ranks
from tests.support.scripts.trainers import like_torchrun

# One for the Trainer and one for Fabric, of either distribution of Lightning.
ROOTS = ["lightning.pytorch", "lightning_fabric"]


def make_strategy(root: str, environment: str, **options: Any) -> Any:
    """A strategy for two processes on the CPU, in one of Lightning's cluster environments."""
    fabric = "lightning.fabric" if root.startswith("lightning.") else "lightning_fabric"
    return strategy_class(root)(
        accelerator=import_module(f"{root}.accelerators").CPUAccelerator(),
        parallel_devices=[torch.device("cpu")] * 2,
        cluster_environment=getattr(import_module(f"{fabric}.plugins.environments"), environment)(),
        **options,
    )


def talk(strategy: Any) -> dict[str, Any]:
    """Set up the environment of `strategy` and return what its collectives do."""
    strategy.setup_environment()
    rank = strategy.global_rank
    reduce = strategy.reduce if hasattr(strategy, "reduce") else strategy.all_reduce
    mine = torch.ones(2, requires_grad=True)
    gathered = strategy.all_gather(mine, sync_grads=True)
    (gathered * rank).sum().backward()
    assert mine.grad is not None
    strategy.barrier()
    return {
        "sum": reduce(torch.tensor([1.0 + rank]), reduce_op="sum").tolist(),
        "mean": reduce(torch.tensor([1.0 + rank])).tolist(),
        "gathered": gathered.tolist(),
        "gradient": mine.grad.tolist(),
        "broadcast": strategy.broadcast({"from": rank}, src=1),
    }


ANSWERS = {
    "sum": [3.0],
    "mean": [1.5],
    "gathered": [[1.0, 1.0], [1.0, 1.0]],
    "gradient": [1.0, 1.0],
    "broadcast": {"from": 1},
}


@for_each("root", ROOTS)
@on_ranks()
@like_torchrun()
def test_its_collectives_work_in_processes_of_another_launcher(root: str) -> None:
    """Nothing but the environment of the strategy is set up."""
    strategy = make_strategy(root, "TorchElasticEnvironment")
    answers = talk(strategy)
    strategy.teardown()
    assert answers == ANSWERS


def test_lightnings_own_launcher_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "")  # set to something first, so that what Lightning sets is undone
    monkeypatch.delenv("MASTER_PORT")
    monkeypatch.setattr(spawn, "_python_exe", os.fsencode(warm.python()))
    strategy = make_strategy("lightning.pytorch", "LightningEnvironment", start_method="spawn")
    assert _MultiProcessingLauncher(strategy=strategy).launch(talk, strategy) == ANSWERS
