"""Modules that cannot be trained data-parallel are refused in words."""

from __future__ import annotations

from torch import nn

from lightning_bucketddp.replicas.replicas import (
    _CALLS,
    _PACKAGES,
    _WRAPPERS,
    find_parallel_submodule,
    parameters_of,
)
from tests.support.cases import for_each
from tests.support.jobs.reducing import setup_error
from tests.support.ranks import run_on_ranks


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))


def on_two_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def with_many_on_another_device() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), *[nn.Linear(2, 2, device="meta") for _ in range(3)])


@for_each(
    ("build", "expected"),
    [
        (frozen, "`Linear` has no parameter that requires a gradient, so there is nothing to train. Unfreeze"),
        (lazy, "`Sequential` has parameters without a shape yet: `1.weight`, `1.bias`. Run one batch through"),
        (on_two_devices, "parameters on several devices: `0.weight`, `0.bias` on cpu; `1.weight`, `1.bias` on meta."),
        (with_many_on_another_device, "`1.weight`, `1.bias`, `2.weight` and 3 more on meta. Each process trains on"),
    ],
)
def test_bad_modules_are_refused(build: object, expected: str) -> None:
    errors = run_on_ranks(setup_error, build=build)
    assert all(expected in error for error in errors), errors


def wrapped_by(module_name: str, class_name: str) -> nn.Sequential:
    """A module in a wrapper of this name, which comes from a package that may not be installed."""
    wrapper = type(class_name, (nn.Sequential,), {"__module__": module_name})
    return nn.Sequential(nn.Linear(2, 2), wrapper(nn.Linear(2, 2)))


@for_each(
    ("module_name", "class_name"),
    [
        ("deepspeed.runtime.engine", "DeepSpeedEngine"),
        ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
        ("torch.distributed.fsdp", "FSDPModule"),
        ("torch.distributed._composable.replicate", "DDP"),
        ("apex.parallel.distributed", "DistributedDataParallel"),
        ("lightning_fabric.wrappers", "_FabricModule"),
    ],
)
def test_what_is_parallel_already_is_found_by_the_name_of_its_class(module_name: str, class_name: str) -> None:
    module = wrapped_by(module_name, class_name)
    assert find_parallel_submodule(module, parameters_of(module)) == ("1", class_name)
    assert find_parallel_submodule(module[1], parameters_of(module)) == (class_name, class_name)
    # Somebody else looks after its parameters.
    module._ddp_params_and_buffers_to_ignore = ["1.0.weight", "1.0.bias"]  # type: ignore[assignment]
    assert find_parallel_submodule(module, parameters_of(module)) is None
    own = wrapped_by("my_project.layers", class_name)
    assert find_parallel_submodule(own, parameters_of(own)) is None


def test_the_names_that_are_looked_for_are_those_of_torch_and_lightning() -> None:
    from lightning.fabric.wrappers import _FabricModule
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    classes = [_FabricModule, DTensor, FullyShardedDataParallel, nn.DataParallel, nn.parallel.DistributedDataParallel]
    assert {kind.__name__ for kind in classes} <= _WRAPPERS | _CALLS.keys()
    assert {kind.__module__.partition(".")[0] for kind in classes} <= _PACKAGES
