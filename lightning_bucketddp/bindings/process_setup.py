"""What our strategies take over from Lightning's own `DDPStrategy`: processes, ranks and devices."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any

# What a strategy takes over from the `DDPStrategy` of Lightning's Trainer, and from that of Fabric.
TRAINER_PROCESS_SETUP = (
    "root_device",
    "num_nodes",
    "num_processes",
    "process_group_backend",
    "setup_distributed",
    "_get_process_group_backend",
    "set_world_ranks",
    "determine_ddp_device_ids",
    "model_to_device",
    "broadcast",
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


def adopt_process_setup(cls: Any, ddp_strategy: Any, names: Iterable[str]) -> None:
    """Have `cls` take over Lightning's own process set-up, and register as a `DDPStrategy`.

    The members in `names` know nothing of torch's DistributedDataParallel; taking them from the Lightning that is
    installed keeps launching, ranks and devices as that version does them. Inheriting instead would bring the rest of
    `DDPStrategy`, which is about the wrapper that we do not have. Being a virtual subclass satisfies Lightning's
    `isinstance` checks for `torch.compile` and distributed samplers, and those of other libraries.
    """
    for name in names:
        setattr(cls, name, vars(ddp_strategy)[name])
    abc.update_abstractmethods(cls)
    ddp_strategy.register(cls)
