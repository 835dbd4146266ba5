"""Binding a strategy to the root of Lightning that it is used with."""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from lightning_bucketddp.strategies.registration import TRAINER_ROOTS, strategy_class

_Class = TypeVar("_Class", bound=type)

# What a strategy takes over from the `DDPStrategy` of Lightning's Trainer, and from that of Fabric.
TRAINER_PROCESS_SETUP = (
    "root_device",
    "num_nodes",
    "num_processes",
    "distributed_sampler_kwargs",
    "process_group_backend",
    "setup_distributed",
    "_get_process_group_backend",
    "set_world_ranks",
    "determine_ddp_device_ids",
    "model_to_device",
    "barrier",
    "broadcast",
    "reduce",
    "_enable_model_averaging",
)
FABRIC_PROCESS_SETUP = (
    "root_device",
    "num_nodes",
    "num_processes",
    "distributed_sampler_kwargs",
    "process_group_backend",
    "_setup_distributed",
    "_get_process_group_backend",
    "_set_world_ranks",
    "_determine_ddp_device_ids",
    "module_to_device",
    "barrier",
    "broadcast",
    "all_reduce",
)


def adopt_process_setup(ddp_strategy: Any, names: Iterable[str]) -> Callable[[_Class], _Class]:
    """A class decorator that takes over Lightning's own process set-up and counts as a `DDPStrategy`.

    The members in `names` know nothing of torch's DistributedDataParallel; taking them from the Lightning that is
    installed keeps launching, ranks and devices as that version does them. Inheriting instead would bring the rest of
    `DDPStrategy`, which is about the wrapper that we do not have. Being a virtual subclass satisfies Lightning's
    `isinstance` checks for `torch.compile` and distributed samplers, and those of other libraries.
    """

    def adopt(cls: _Class) -> _Class:
        for name in names:
            setattr(cls, name, vars(ddp_strategy)[name])
        abc.update_abstractmethods(cls)
        ddp_strategy.register(cls)
        return cls

    return adopt


def accept_in_every_trainer(strategy: type) -> None:
    """Have the Trainers of all roots that are imported take instances of `strategy`, whichever root they are made for.

    Import sorters put `from lightning_bucketddp import BucketDDPStrategy` before `import pytorch_lightning`, when it
    cannot be known yet which Trainer will get it. It turns into the right class when it does.
    """
    for root in TRAINER_ROOTS:
        if hasattr(strategies := sys.modules.get(f"{root}.strategies"), "Strategy"):
            strategies.Strategy.register(strategy)  # type: ignore[union-attr]


def follow_root(strategy: object, accelerator: object) -> None:
    """Turn `strategy` into the class for the root of Lightning that `accelerator` is from, if it is for another."""
    modules = [base.__module__ for base in type(accelerator).__mro__]
    for root in TRAINER_ROOTS:
        if any(module.startswith(f"{root}.") for module in modules):
            wanted = strategy_class(root)
            if isinstance(strategy, wanted):
                return
            if not type(strategy).__module__.startswith("lightning_bucketddp."):
                raise TypeError(
                    f"`{type(strategy).__name__}` derives from a `BucketDDPStrategy` for another root of Lightning than"
                    f" `{root}`, where the Trainer is from. Derive it from `{wanted.__module__}.BucketDDPStrategy`."
                )
            strategy.__class__ = wanted  # instances for different roots have the same attributes
