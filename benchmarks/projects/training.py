"""Train one project with some strategies, and write what each rank ends with.

    python -m benchmarks.projects.training PROJECT FOLDER STRATEGY [STRATEGY ...]

It runs in the projects' own environment. Importing a package takes longer than training its model: ranks are forked
from one process that has done it, and find what a launcher would have set in their environment.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import seed_everything
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.ports import own_port
from benchmarks.projects.comparison import NUM_RANKS
from lightning_bucketddp.bindings.registration import strategy_class

# `bucketddp` with an option that changes the result: a comparison that does not notice it is worth nothing.
CONTROL = "bucketddp_bf16"


class Steps:
    """Count the steps of all optimizers, keep these, and see how they train."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_ranks = 1
        self.rank = 0
        self.in_torch_ddp = False
        self.optimizers: list[Optimizer] = []
        register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if self.num_steps == 0:
            self.num_ranks, self.rank = distributed.get_world_size(), distributed.get_rank()
            self.in_torch_ddp = any(type(made) is DistributedDataParallel for made in gc.get_objects())
        self.num_steps += 1
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)


def tensors_in(value: Any, name: str) -> dict[str, torch.Tensor]:
    """Return all tensors and numbers in a nest of containers, by their path in it."""
    if isinstance(value, torch.Tensor):
        return {name: value.detach()}
    if isinstance(value, (bool, int, float)):
        return {name: torch.tensor(value, dtype=torch.float64)}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {path: tensor for key, part in items for path, tensor in tensors_in(part, f"{name}.{key}").items()}


def register_control() -> None:
    """Add a strategy to the registries of all roots whose gradients travel as bf16."""
    for root in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric"):
        strategies = import_module(f"{root}.strategies")
        registry = strategies.STRATEGY_REGISTRY if "fabric" in root else strategies.StrategyRegistry
        registry.register(CONTROL, strategy_class(root), reduce_dtype="bf16")


def train(project: str, strategy: str, folder: Path) -> None:
    """Train as one rank."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    if strategy == CONTROL:
        register_control()
    steps = Steps()
    seed_everything(1, verbose=False)
    module = import_module(f"benchmarks.projects.{project}").train(strategy)
    found = {
        "tensors": tensors_in(module.state_dict(), "weights")
        | tensors_in([optimizer.state_dict() for optimizer in steps.optimizers], "optimizers"),
        "num_steps": steps.num_steps,
        "num_ranks": steps.num_ranks,
        "in_torch_ddp": steps.in_torch_ddp,
    }
    torch.save(found, folder / f"rank{steps.rank}.pt")


def main(project: str, folder: str, *strategies: str) -> None:
    import_module(f"benchmarks.projects.{project}")
    context = multiprocessing.get_context("fork")
    for strategy in strategies:
        print(f"==== {strategy}", flush=True)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(own_port())
        ranks = []
        for rank in range(NUM_RANKS):
            os.environ["LOCAL_RANK"] = str(rank)
            ranks.append(context.Process(target=train, args=(project, strategy, Path(folder) / strategy)))
            ranks[-1].start()
        for process in ranks:
            process.join()
        if exit_codes := [process.exitcode for process in ranks if process.exitcode]:
            sys.exit(f"`{strategy}` ended with exit status {exit_codes[0]}.")


if __name__ == "__main__":
    main(*sys.argv[1:])
