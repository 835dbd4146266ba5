"""Jobs that use a strategy by itself, in processes that something else has launched: no Trainer, no Fabric."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from lightning_bucketddp.bindings.registration import strategy_class
from tests.support.scripts.trainers import like_torchrun

ROOTS = ["lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"]


def make_strategy(root: str, environment: str, **options: Any) -> Any:
    """A strategy for two processes on the CPU, in one of Lightning's cluster environments."""
    fabric = "lightning.fabric" if root.startswith("lightning.") else "lightning_fabric"
    return strategy_class(root)(
        accelerator=import_module(f"{root}.accelerators").CPUAccelerator(),
        parallel_devices=[torch.device("cpu")] * 2,
        cluster_environment=getattr(import_module(f"{fabric}.plugins.environments"), environment)(),
        **options,
    )


@like_torchrun()
def talk_in_launched_processes(*, root: str) -> dict[str, Any]:
    """What the collectives of a strategy return that only its environment was set up of."""
    strategy = make_strategy(root, "TorchElasticEnvironment")
    answers = talk(strategy)
    strategy.teardown()
    return answers


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
