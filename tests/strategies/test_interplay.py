"""Questions to the strategy, and backends: as with `ddp`, on two processes."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.ports import own_port
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support.ranks import RankPool, on_ranks
from tests.support.scripts.models import Regression, loader
from tests.support.scripts.trainers import like_torchrun, make_trainer


class Asking(Regression):
    """Asks the strategy and the Trainer everything that they answer."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, Any] = {}

    def on_train_start(self) -> None:
        trainer, rank = self.trainer, self.global_rank
        strategy: Any = trainer.strategy
        module: Any = self
        mine = torch.tensor([rank + 1.0, 10.0 * rank])
        strategy.barrier("here")
        self.answers = {
            "mean": strategy.reduce(mine.clone()).tolist(),
            "sum": strategy.reduce(mine.clone(), reduce_op="sum").tolist(),
            "all_gather": strategy.all_gather(mine).tolist(),
            "all_gather_by_module": {k: v.tolist() for k, v in module.all_gather({"a": mine, "b": mine.int()}).items()},
            "broadcast": strategy.broadcast({"from": rank}, src=1),
            "all_agree": [strategy.reduce_boolean_decision(rank >= least) for least in (0, 1, 2)],
            "any_agrees": [strategy.reduce_boolean_decision(rank >= least, all=False) for least in (0, 1, 2)],
            "ranks": (strategy.global_rank, strategy.local_rank, strategy.node_rank, strategy.world_size),
            "processes": (strategy.num_nodes, strategy.num_processes, strategy.is_global_zero),
            "device": (str(strategy.root_device), [str(device) for device in strategy.parallel_devices]),
            "sampler": strategy.distributed_sampler_kwargs,
            "trainer": (trainer.global_rank, trainer.world_size, trainer.num_devices, trainer.is_global_zero),
            "is_module": trainer.lightning_module is strategy.lightning_module is self,
            "names": list(strategy.lightning_module_state_dict()),
            "optimizers": [type(optimizer).__name__ for optimizer in strategy.optimizers],
            "is_ddp": isinstance(strategy, DDPStrategy),
            "handles_accumulation": strategy.handles_gradient_accumulation,
            "restores_late": strategy.restore_checkpoint_after_setup,
        }


def train_over_backend(*, backend: str, ports: list[int]) -> dict[str, Any]:
    """The backend in use and the weights, by strategy. Leaves no process group, so it needs a pool of its own."""
    results = {}
    with like_torchrun():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for kind, port in zip((DDPStrategy, BucketDDPStrategy), ports, strict=True):
            dist.destroy_process_group()
            # Another port each time: the store of the last group may still be there when this rank is first.
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            torch.manual_seed(rank)
            module = Regression()
            trainer = make_trainer(kind(process_group_backend=backend), devices=world_size, max_epochs=1)
            trainer.fit(module, loader())
            weights = {name: value.tolist() for name, value in module.state_dict().items()}
            results[kind.__name__] = (str(dist.distributed_c10d.get_backend_config()), weights)
    return results


@on_ranks()
@like_torchrun()
def test_strategy_and_trainer_answer_as_with_ddp() -> None:
    ours, ddp = Asking(), Asking()
    for strategy, module in (("bucketddp", ours), ("ddp", ddp)):
        make_trainer(strategy, max_epochs=1, limit_train_batches=1).fit(module, loader())
    assert ours.answers == ddp.answers
    assert ours.answers["mean"] == [1.5, 5.0]


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
