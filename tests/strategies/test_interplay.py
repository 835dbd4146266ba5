"""Questions to the strategy, loggers and backends: as with `ddp`, on two processes; and a strategy alone."""

from __future__ import annotations

import csv
import importlib.util
import os
from importlib import import_module
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch import Tensor

from benchmarks.ports import own_port
from lightning_bucketddp.bindings.registration import strategy_class
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support import warm
from tests.support.cases import for_each
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


class Logging(Regression):
    """Logs by step and by epoch, from all ranks and from this one."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("own", loss)
        return loss


def values_in(folder: Path, logger: str) -> Any:
    if logger == "csv":
        with (folder / "metrics.csv").open() as file:
            return list(csv.DictReader(file))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


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


has_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)


@on_ranks()
@like_torchrun()
def test_strategy_and_trainer_answer_as_with_ddp() -> None:
    ours, ddp = Asking(), Asking()
    for strategy, module in (("bucketddp", ours), ("ddp", ddp)):
        make_trainer(strategy, max_epochs=1, limit_train_batches=1).fit(module, loader())
    assert ours.answers == ddp.answers
    assert ours.answers["mean"] == [1.5, 5.0]


@pytest.mark.parametrize("logger", ["csv", pytest.param("tensorboard", marks=has_tensorboard)])
@on_ranks()
@like_torchrun()
def test_log_files_are_those_of_ddp(logger: str, tmp_path: Path) -> None:
    outcomes = []
    for strategy in ("bucketddp", "ddp"):
        torch.manual_seed(dist.get_rank())
        made = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}[logger](tmp_path / strategy, name="")
        trainer = make_trainer(strategy, max_epochs=2, logger=made, log_every_n_steps=4)
        trainer.fit(Logging(), loader(), loader())
        # Only rank 0 knows where it has written, and that it has.
        folder = Path(trainer.strategy.broadcast(made.log_dir))
        outcomes.append((sorted(name.split(".")[0] for name in os.listdir(folder)), values_in(folder, logger)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1]
    assert len(list((tmp_path / "bucketddp").rglob("version_*"))) == 1


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


# --- A strategy without a Trainer or Fabric

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
def test_keywords_of_torchs_ddp_are_where_packages_look_for_them(root: str) -> None:
    """As in `assert trainer.strategy._ddp_kwargs["broadcast_buffers"] is False`."""
    options = {"broadcast_buffers": False, "find_unused_parameters": True}
    ours = strategy_class(root)(**options, timeout=60)
    assert ours._ddp_kwargs == import_module(f"{root}.strategies").DDPStrategy(**options)._ddp_kwargs == options
    with pytest.raises(TypeError, match="does not support item assignment"):
        ours._ddp_kwargs["broadcast_buffers"] = True


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
