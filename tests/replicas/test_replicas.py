"""Modules that cannot be trained data-parallel, or differ between ranks, are refused in words."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.replicas.replicas import (
    _CALLS,
    _PACKAGES,
    _WRAPPERS,
    ReplicaMismatchError,
    Replicas,
    find_parallel_submodule,
    parameters_of,
)
from tests.support.cases import for_each
from tests.support.jobs.parity import build_reducer
from tests.support.ranks import device, on_ranks


def different_buffers(rank: int) -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.zeros(3 + rank))
    return model


def channels_last(conv: nn.Module) -> nn.Module:
    return conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


# How each rank builds it, and how the error begins that all of them raise.
DIFFERENT: list[tuple[Callable[[int], nn.Module], str]] = [
    (
        lambda rank: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + (rank == 1))),
        "`1.weight` has shape [4, 4] on rank 0 but [5, 4] on rank 1.",
    ),
    (  # torch DDP does not notice: rank 1's weights become garbage and gloo ends the process
        lambda rank: nn.Linear(4, 4, dtype=torch.float64 if rank == 1 else torch.float32),
        "`weight` has dtype torch.float32 on rank 0 but torch.float64 on rank 1.",
    ),
    (
        lambda rank: nn.Linear(4, 4).requires_grad_(rank != 1),
        "`weight` has requires_grad True on rank 0 but False on rank 1.",
    ),
    (
        lambda rank: nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 + (rank == 0))]),
        "`2.weight` exists on rank 0 but not on rank 1.",
    ),
    (
        lambda rank: channels_last(nn.Conv2d(3, 4, 3)) if rank == 1 else nn.Conv2d(3, 4, 3),
        "`weight` has stride [27, 9, 3, 1] on rank 0 but [27, 1, 9, 3] on rank 1.",
    ),
    (different_buffers, "`table` has shape [3] on rank 0 but [4] on rank 1."),
    (
        lambda rank: nn.ModuleDict({name: nn.Linear(4, 4) for name in (("a", "b") if rank == 0 else ("b", "a"))}),
        "The ranks register their parameters or buffers in different order: number 0 is `a.weight` on rank 0 but"
        " `b.weight` on rank 1.",
    ),
]
# How it is built on all ranks, and what the error has in it.
UNTRAINABLE: list[tuple[Callable[[], nn.Module], str]] = [
    (
        lambda: nn.Linear(2, 2).requires_grad_(False),
        "`Linear` has no parameter that requires a gradient, so there is nothing to train. Unfreeze",
    ),
    (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)),
        "`Sequential` has parameters without a shape yet: `1.weight`, `1.bias`. Run one batch through",
    ),
    (
        lambda: nn.Sequential(nn.Linear(2, 2), *[nn.Linear(2, 2, device="meta") for _ in range(3)]),
        "`1.weight`, `1.bias`, `2.weight` and 3 more on meta. Each process trains on",
    ),
    (
        lambda: nn.Sequential(nn.Embedding(3, 2), nn.Embedding(3, 2, max_norm=1.0)),
        "The forward of `1` scales the weights that its batch uses to `max_norm`",
    ),
]


def assert_refused(build: Callable[[int], nn.Module], expected: str) -> None:
    with pytest.raises(ReplicaMismatchError, match=f"^{re.escape(expected)}"):
        Replicas(build(dist.get_rank()).to(device()), Collectives(device())).agree()


@on_ranks()
def test_different_modules_are_refused_on_every_rank() -> None:
    for build, expected in DIFFERENT:
        assert_refused(build, expected)


@on_ranks()
def test_bad_modules_are_refused() -> None:
    for build, expected in UNTRAINABLE:
        with pytest.raises(ValueError, match=re.escape(expected)):
            build_reducer(build())


def wrapped_by(module_name: str, class_name: str) -> nn.Sequential:
    """A module in a wrapper of this name, which comes from a package that may not be installed."""
    wrapper = type(class_name, (nn.Sequential,), {"__module__": module_name})
    return nn.Sequential(nn.Linear(2, 2), wrapper(nn.Linear(2, 2)))


@for_each(
    ("module_name", "class_name"),
    [
        ("deepspeed.runtime.engine", "DeepSpeedEngine"),
        ("torch.distributed.fsdp", "FSDPModule"),
        ("apex.parallel.distributed", "DistributedDataParallel"),
        ("lightning_fabric.wrappers", "_FabricModule"),
    ],
)
def test_what_is_parallel_already_is_found_by_the_name_of_its_class(module_name: str, class_name: str) -> None:
    module = wrapped_by(module_name, class_name)
    assert find_parallel_submodule(module, parameters_of(module)) == ("1", class_name)
    assert find_parallel_submodule(module[1], parameters_of(module)) == (class_name, class_name)
    # Its parameters are not ours.
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
