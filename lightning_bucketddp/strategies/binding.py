"""Binding a strategy to the root of Lightning that it is used with."""

from __future__ import annotations

import abc
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from lightning_bucketddp.strategies.registration import FABRIC_ROOTS, TRAINER_ROOTS, strategy_class

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


def accept_in_every_root(strategy: type) -> None:
    """Have the Trainers and Fabrics of all roots that are imported take instances of `strategy`, made for a Trainer.

    Import sorters put `from lightning_bucketddp import BucketDDPStrategy` before `import pytorch_lightning`, when it
    cannot be known yet who will get it. It turns into the right class when somebody does.
    """
    for root in (*TRAINER_ROOTS, *FABRIC_ROOTS):
        if hasattr(strategies := sys.modules.get(f"{root}.strategies"), "Strategy"):
            strategies.Strategy.register(strategy)  # type: ignore[union-attr]


def follow_root(strategy: Any, accelerator: object) -> None:
    """Turn `strategy` into the class for the root of Lightning that `accelerator` is from, if it is for another."""
    modules = [base.__module__ for base in type(accelerator).__mro__]
    # Accelerators of a Trainer derive from those of Fabric.
    roots = (*TRAINER_ROOTS, *FABRIC_ROOTS)
    root = next((root for root in roots if any(module.startswith(f"{root}.") for module in modules)), None)
    if root is None or isinstance(strategy, wanted := strategy_class(root)):
        return
    if not type(strategy).__module__.startswith("lightning_bucketddp."):
        raise TypeError(
            f"`{type(strategy).__name__}` derives from a `BucketDDPStrategy` for another root of Lightning than"
            f" `{root}`, where the {'Trainer' if root in TRAINER_ROOTS else 'Fabric'} is from. Derive it from"
            f" `{wanted.__module__}.BucketDDPStrategy`."
        )
    strategy.__class__ = wanted
    if root in FABRIC_ROOTS:  # instances for different Trainers have the same attributes
        _make_again(strategy)


def _make_again(strategy: Any) -> None:
    """Initialise `strategy`, which was made for a Trainer, as what it is now."""
    options = {**strategy.given_options, "start_method": strategy._start_method}
    for name in options.keys() - inspect.signature(type(strategy)).parameters.keys():
        raise TypeError(
            f"`{name}` is an option of `BucketDDPStrategy` for the Trainer, and there is no such thing for Fabric."
            f" Leave it out, or see `{type(strategy).__module__}.BucketDDPStrategy` for what there is."
        )
    vars(strategy).clear()
    strategy.__init__(**options)
    strategy.given_options = options
