"""`Fabric(strategy="bucketddp")` on two processes does what `Fabric(strategy="ddp")` does.

tests/fuzz draws loops of the common blocks. Here is what users do beside those.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

import lightning_bucketddp
from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy
from lightning_bucketddp.comm.collectives import Collectives
from tests.strategies.test_equals_ddp import mask
from tests.support.cases import for_each
from tests.support.collectives import all_reduced
from tests.support.programs import REPOSITORY, run
from tests.support.ranks import device, on_ranks, raised_by, run_on_ranks
from tests.support.scripts.fabrics import ROOTS, make_fabric
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun

NUM_STEPS = 6
Weights = list[dict[str, Tensor]]


def network() -> nn.Module:
    """Return a module whose weights count on rank 0."""
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def set_up(fabric: Any, module: nn.Module | None = None) -> tuple[Any, Any]:
    module = module or network()
    return fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))


def loss_of(module: Callable[[Tensor], Tensor], step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    return module(torch.randn(4, 4, generator=generator).to(device())).square().mean()


def take_step(fabric: Any, module: Any, optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()


def weights_of(*modules: nn.Module) -> Weights:
    return [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]


def train(fabric: Any, module: nn.Module | None = None) -> Weights:
    module, optimizer = set_up(fabric, module)
    for step in range(NUM_STEPS):
        take_step(fabric, module, optimizer, loss_of(module, step))
    return weights_of(module)


def accumulate(fabric: Any, **limit: float) -> Weights:
    module, optimizer = set_up(fabric)
    for step in range(NUM_STEPS):
        is_last = step % 3 == 2
        with fabric.no_backward_sync(module, enabled=not is_last):
            fabric.backward(loss_of(module, step))
        if is_last:
            if limit:
                fabric.clip_gradients(module, optimizer, **limit)
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(module)


def two_modules(fabric: Any) -> Weights:
    """Train a generator and a critic; the generator's loss goes through the critic too."""
    generator, generator_optimizer = set_up(fabric)
    critic, critic_optimizer = set_up(fabric, nn.Linear(1, 1))
    for step in range(NUM_STEPS):
        loss = -loss_of(lambda x: critic(generator(x).detach()), step)
        take_step(fabric, critic, critic_optimizer, loss)
        take_step(fabric, generator, generator_optimizer, loss_of(lambda x: critic(generator(x)), step))
    return weights_of(generator, critic)


def named_module(fabric: Any) -> Weights:
    """Name one of two modules in each backward; what the generator's loss gives to the critic is kept and stepped."""
    generator, generator_optimizer = set_up(fabric)
    critic, critic_optimizer = set_up(fabric, nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
    for step in range(NUM_STEPS):
        fabric.backward(loss_of(lambda x: critic(generator(x)), step), model=generator)
        generator_optimizer.step()
        generator_optimizer.zero_grad()
        fabric.backward(loss_of(lambda x: critic(generator(x).detach()), step), model=critic)
        critic_optimizer.step()
        critic_optimizer.zero_grad()
    return weights_of(generator, critic)


def scheduler_by_position(fabric: Any) -> Weights:
    """Give `fabric.setup` a scheduler behind the optimizer, which sets up both alike."""
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    wrapped, optimizer, schedule = fabric.setup(module, optimizer, schedule)
    for step in range(NUM_STEPS):
        take_step(fabric, wrapped, optimizer, loss_of(wrapped, step))
        schedule.step()
    return [*weights_of(module), {"rates": torch.tensor(schedule.state_dict()["_last_lr"])}]


def copied(fabric: Any) -> Weights:
    """Train with a copy of the module as teacher, which follows it."""
    module, optimizer = set_up(fabric)
    take_step(fabric, module, optimizer, loss_of(module, 0))
    teacher, _ = copy.deepcopy((module, optimizer))
    for step in range(1, NUM_STEPS):
        with torch.no_grad():
            loss = loss_of(teacher, step)
        take_step(fabric, module, optimizer, (loss_of(module, step) - loss).square())
        for theirs, ours in zip(teacher.parameters(), module.parameters(), strict=True):
            theirs.data.lerp_(ours.data, 0.5)
    return weights_of(module, teacher)


def head_replaced(fabric: Any) -> Weights:
    """Set the module up again, with another last layer."""
    module = network()
    train(fabric, module)
    module[-1] = nn.Linear(8, 1)  # type: ignore[operator]
    return train(fabric, module)


def idle_rank(fabric: Any) -> Weights:
    """Give rank 1 a loss without any parameter in it, or say the same in a way that torch DDP accepts."""
    module, optimizer = set_up(fabric)
    is_ours = "bucketddp" in type(fabric.strategy).__module__
    for step in range(NUM_STEPS):
        loss = loss_of(module, step)
        if fabric.global_rank == 1:
            loss = torch.zeros((), device=device(), requires_grad=True) if is_ours else 0 * loss
        take_step(fabric, module, optimizer, loss)
    with torch.no_grad():
        module.eval()(torch.zeros(1, 4, device=device()))  # shares the buffers
    return weights_of(module)


class Scaled(nn.Linear):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale.clone() * super().forward(x)


def buffer_between_steps(fabric: Any) -> Weights:
    """Change a buffer between steps, on every rank in its own way; what rank 0 made of it counts."""
    torch.manual_seed(dist.get_rank())
    module = Scaled()
    wrapped, optimizer = set_up(fabric, module)
    for step in range(NUM_STEPS):
        module.scale *= 0.9 + 0.5 * fabric.global_rank
        take_step(fabric, wrapped, optimizer, loss_of(wrapped, step))
    return weights_of(module)


def compiled(fabric: Any) -> Weights:
    """Train a compiled module, with an evaluation between two steps."""
    module: Any = torch.compile(network(), backend="aot_eager")
    wrapped, optimizer = set_up(fabric, module)
    for step in range(NUM_STEPS):
        take_step(fabric, wrapped, optimizer, loss_of(wrapped, step))
        if step == 2:
            with torch.no_grad():
                wrapped.eval()(torch.zeros(1, 4, device=device()))
            wrapped.train()
    return weights_of(module)


def hooks_after_set_up(fabric: Any) -> Weights:
    module, optimizer = set_up(fabric)
    for param in module.parameters():
        param.register_post_accumulate_grad_hook(mask)
    take_step(fabric, module, optimizer, loss_of(module, 0))
    return weights_of(module)


LOOPS: dict[str, Callable[[Any], Weights]] = {
    "hooks_after_set_up": hooks_after_set_up,
    "no_backward_sync": accumulate,
    "clip_norm": lambda fabric: accumulate(fabric, max_norm=0.1),
    "two_modules": two_modules,
    "named_module": named_module,
    "head_replaced": head_replaced,
    "copied": copied,
    "scheduler_by_position": scheduler_by_position,
    "buffer_between_steps": buffer_between_steps,
    "compiled": compiled,
    "idle_rank": idle_rank,
}


@pytest.mark.parametrize("loop", LOOPS)
@on_ranks()
@like_torchrun()
def test_training_equals_ddp(loop: str) -> None:
    strategies = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB), "ddp"
    ours, ddp = (LOOPS[loop](make_fabric(strategy)) for strategy in strategies)
    torch.testing.assert_close(ours, ddp, rtol=0, atol=0)


@on_ranks()
@like_torchrun()
def test_both_roots_and_the_class_that_is_for_the_trainer_too_train_alike() -> None:
    expected, other_root = (two_modules(make_fabric("bucketddp", root=root)) for root in ROOTS)
    public = two_modules(make_fabric(lightning_bucketddp.BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB)))
    for weights in (other_root, public):
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@on_ranks()
@like_torchrun()
def test_accumulation_reduces_each_bucket_once_per_step() -> None:
    """Gradients accumulate over three backwards, twice."""
    fabric = make_fabric(BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB))
    with all_reduced() as reduced:
        accumulate(fabric)
    [reducer] = fabric.strategy.reducers.values()
    reductions_by_bucket = [
        sum(tensor.data_ptr() == bucket.wire.data_ptr() for tensor in reduced) for bucket in reducer.bucket_set.buckets
    ]
    assert len(reductions_by_bucket) > 1
    assert set(reductions_by_bucket) == {2}


class Branches(nn.Module):
    """A branch is used by rank 0 in some steps, and by rank 1 in others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 8), nn.Linear(8, 1)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.last(self.branches[branch](self.first(x).tanh()))


def branches_of_two_modules(fabric: Any) -> Weights:
    torch.manual_seed(dist.get_rank())
    (first, first_optimizer), (second, second_optimizer) = (set_up(fabric, Branches(width)) for width in (4, 1))
    for step in range(NUM_STEPS):
        own, others = (step + dist.get_rank()) % 2, (step // 3 + dist.get_rank()) % 2
        first_optimizer.zero_grad()
        take_step(fabric, None, second_optimizer, loss_of(lambda x: second(first(x, own), others), step))  # noqa: B023
        first_optimizer.step()
    return weights_of(first, second)


@on_ranks()
@like_torchrun()
def test_ranks_that_use_different_parts_of_two_modules_equal_ddp() -> None:
    strategies = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB), "ddp_find_unused_parameters_true"
    ours, ddp = (branches_of_two_modules(make_fabric(strategy)) for strategy in strategies)
    torch.testing.assert_close(ours, ddp, rtol=0, atol=0)


def communicating(fabric: Any) -> Weights:
    """Exchange something within backwards through two modules, but not in the first ones."""
    generator, generator_optimizer = set_up(fabric)
    critic, critic_optimizer = set_up(fabric, nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
    for step in range(NUM_STEPS):
        made = loss_of(generator, step).reshape(1, 1)
        if step > 1:
            made.register_hook(lambda gradient: fabric.all_reduce(gradient.clone()))
        critic_optimizer.zero_grad()
        take_step(fabric, None, generator_optimizer, critic(made).sum())
        critic_optimizer.step()
    return weights_of(generator, critic)


@on_ranks()
@like_torchrun()
def test_a_program_may_communicate_within_backwards_of_two_modules() -> None:
    """Also where gradients and the program share a process group, as on a GPU."""
    expected = communicating(make_fabric("ddp"))
    with patch.object(Collectives, "gradient_group", lambda self: self):
        ours = communicating(make_fabric(BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB)))
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def save_and_load(saved_by: Any, loaded_by: Any, path: Path) -> tuple[Weights, Weights]:
    """Save after a step, and load that with another strategy; return the weights of both after one more step."""
    trained = []
    for strategy in (saved_by, loaded_by):
        fabric = make_fabric(strategy)
        module, optimizer = set_up(fabric)
        state = {"module": module, "optimizer": optimizer, "step": 1}
        if strategy is loaded_by:
            fabric.load(path, state)
        else:
            take_step(fabric, module, optimizer, loss_of(module, 0))
            fabric.save(path, state)
        take_step(fabric, module, optimizer, loss_of(module, state["step"]))
        trained.append(weights_of(module))
    return trained[0], trained[1]


@for_each(("saved_by", "loaded_by"), [("ddp", "bucketddp"), ("bucketddp", "ddp")])
@on_ranks()
@like_torchrun()
def test_a_loaded_checkpoint_trains_on(saved_by: str, loaded_by: str, tmp_path: Path) -> None:
    saved, loaded = save_and_load(saved_by, loaded_by, tmp_path / f"{saved_by}.ckpt")
    if dist.get_rank() == 0:  # torch DDP leaves the others the statistics of their last batch
        torch.testing.assert_close(saved, loaded, rtol=0, atol=0)


@like_torchrun()
def failure_to_save(*, path: Path) -> str:
    return raised_by(lambda: make_fabric("bucketddp").save(path, {"step": 1}))


def test_a_failure_to_save_is_raised_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "model.ckpt"
    rank_zero, rank_one = run_on_ranks(failure_to_save, path=path)
    assert rank_zero.startswith(f"CheckpointWriteError: Could not write checkpoint `{path}`: Not a directory.")
    assert rank_one == f"{rank_zero} (on rank 0)"


@for_each("root", ROOTS)
@on_ranks()
@like_torchrun()
def test_a_module_that_is_parallel_already_is_refused_on_every_rank(root: str) -> None:
    parallel = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    wrapped = "is wrapped in `DistributedDataParallel`, but this strategy averages the gradients of all submodules"
    for module, name in ((nn.Sequential(nn.Linear(4, 4), parallel), "1"), (parallel, "DistributedDataParallel")):
        with pytest.raises(ValueError, match=f"^`{name}` {wrapped} by itself. Leave the wrapper out"):
            set_up(make_fabric("bucketddp", root=root), module)


@for_each("by_another", [False, True])
@on_ranks()
@like_torchrun()
def test_a_module_that_is_set_up_again_is_averaged_once(by_another: bool) -> None:
    expected = train(make_fabric("bucketddp"))
    fabric = make_fabric("bucketddp")
    module, _ = set_up(fabric)
    weights = train(make_fabric("bucketddp") if by_another else fabric, module.module)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@on_ranks()
@like_torchrun()
def test_modules_that_share_parameters_cannot_both_be_set_up() -> None:
    fabric = make_fabric("bucketddp")
    module, _ = set_up(fabric)
    part = nn.Sequential(module.module[0], nn.Linear(8, 1))
    assert raised_by(lambda: set_up(fabric, part)) == (
        "ValueError: `0.weight` belongs to another module, too, that was set up before: its gradient would be averaged"
        " twice. Set up one module that holds all parameters."
    )


@for_each("num_copies", [1, 2])
@on_ranks()
@like_torchrun()
def test_a_copy_cannot_be_trained_before_it_is_set_up(num_copies: int) -> None:
    fabric = make_fabric("bucketddp")
    copied, _ = set_up(fabric)
    for _ in range(num_copies):
        copied = copy.deepcopy(copied)
    assert raised_by(lambda: fabric.backward(loss_of(copied, 0))).startswith(
        "RuntimeError: This `Sequential` is a copy of a module that `fabric.setup` has returned, and its gradients are"
        " not averaged over the ranks. To train it, pass its `.module` to `fabric.setup`"
    )
    expected = train(make_fabric("ddp"), copy.deepcopy(copied.module))
    torch.testing.assert_close(train(make_fabric("bucketddp"), copied.module), expected, rtol=0, atol=0)


def train_spawned(fabric: Any) -> list[list[float]]:
    return [value.tolist() for value in train(fabric)[0].values()]  # tensors would end with the process that made them


def train_where_ranks_are_spawned() -> None:
    """A program of its own: print whether the weights are those of `ddp`."""
    ours, ddp = (
        Fabric(accelerator="cpu", devices=2, strategy=name).launch(train_spawned)
        for name in ("bucketddp_spawn", "ddp_spawn")
    )
    print("weights are equal:", ours == ddp)


def test_ranks_are_spawned(tmp_path: Path) -> None:
    program = f"from {__name__} import train_where_ranks_are_spawned as train; train()"
    finished = run("-c", program, root="lightning.pytorch", directory=tmp_path, cwd=REPOSITORY)
    assert "weights are equal: True" in finished.output, finished.output


@on_ranks()
@like_torchrun()
def test_a_step_with_gradients_that_nobody_averaged_is_refused() -> None:
    module, optimizer = set_up(make_fabric("bucketddp"))
    loss_of(module, 0).backward()
    with pytest.raises(RuntimeError, match=r"were not averaged over the ranks.*Call `fabric.backward\(loss\)`"):
        optimizer.step()
