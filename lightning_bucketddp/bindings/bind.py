"""Makes our classes for one root of Lightning: each root defines classes of its own, and accepts only those."""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from lightning_bucketddp.bindings.registration import accept_in_every_root, follow_root
from lightning_bucketddp.checkpoint.checkpoint_io import AtomicCheckpointIO
from lightning_bucketddp.strategies.launchers import ProcessLauncher, ScriptLauncher
from lightning_bucketddp.trainer_internals import known

# By public name: where a callback or the tuner is, less its Lightning base class, and where that one is.
_CALLBACKS = {
    "BatchSizeFinder": ("batch_size_finder", "SharedBatchSizeFinder", "callbacks", "BatchSizeFinder"),
    "BucketDDPMonitor": ("monitor", "StepMonitoring", "callbacks", "Callback"),
    "ScaleLearningRate": ("scaling", "LearningRateScaling", "callbacks", "Callback"),
    "ScalingMonitor": ("scaling", "ScalingMeasurement", "callbacks", "Callback"),
    "Tuner": ("batch_size_finder", "SharedTuner", "tuner", "Tuner"),
}

# What a strategy takes over from Lightning's `DDPStrategy`: from both, from that of the Trainer, and from Fabric's.
_FROM_BOTH = (
    *("root_device", "num_nodes", "num_processes", "process_group_backend", "_get_process_group_backend"),
    *("barrier", "broadcast"),
)
_FROM_TRAINER = (
    *("setup_distributed", "set_world_ranks", "determine_ddp_device_ids", "model_to_device"),
    "_enable_model_averaging",
)
_FROM_FABRIC = (
    *("_setup_distributed", "_set_world_ranks", "_determine_ddp_device_ids", "module_to_device"),
    *("distributed_sampler_kwargs", "all_reduce"),
)


@functools.cache
def bound_class(name: str, root: str, module: str) -> Any:
    """Return the callback `name` for `root`, as one of `module`; made when it is asked for, because it imports much."""
    if name not in _CALLBACKS:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    file, part_name, base_module, base_name = _CALLBACKS[name]
    part = getattr(import_module(f"lightning_bucketddp.callbacks.{file}"), part_name)
    base = getattr(import_module(f"{root}.{base_module}"), base_name)
    return _made(name, module, part, base, _binding=module, lightning_base=base)


def bind_trainer(root: str, *, fabric: str, module: str) -> dict[str, type]:
    """Return the classes for the Trainer of `root`, which `module` has to define."""
    from lightning_bucketddp.strategies.trainer import TrainerStrategy

    strategies = import_module(f"{root}.strategies")
    exceptions = import_module(f"{root}.utilities.exceptions")
    classes = _classes_of_processes(f"{root}.strategies.launchers", fabric=fabric, module=module)
    interrupt = known(import_module(f"{root}.trainer.call"), "_interrupt")
    classes["_ProcessLauncher"].on_exception_of = staticmethod(interrupt)
    of_root = _names_of_root(
        classes,
        fabric,
        wrapping_checkpoint_io=known(import_module(f"{root}.plugins.io.wrapper"), "_WrappingCheckpointIO"),
        async_checkpoint_io=import_module(f"{root}.plugins.io").AsyncCheckpointIO,
        torch_sync_batchnorm=import_module(f"{root}.plugins.layer_sync").TorchSyncBatchNorm,
        callback=import_module(root).Callback,
        reduce=strategies.DDPStrategy.reduce,
        batch_size_of=import_module(f"{root}.utilities.data").extract_batch_size,
        is_oom_error=import_module(f"{root}.utilities.memory").is_oom_error,
        # What a Trainer raises when SIGTERM stops it, and when tuning is over.
        sigterm_exception=exceptions.SIGTERMException,
        normal_ends=(known(exceptions, "_TunerExitException"),),
        interrupt=interrupt,
    )
    strategy = _made("BucketDDPStrategy", module, TrainerStrategy, strategies.ParallelStrategy, root=of_root)
    adopt_process_setup(strategy, strategies.DDPStrategy, _FROM_TRAINER)
    accept_in_every_root(TrainerStrategy)
    return {**classes, "BucketDDPStrategy": strategy}


def bind_fabric(root: str, *, module: str) -> dict[str, type]:
    """Return the classes for the Fabric of `root`, which `module` has to define."""
    from lightning_bucketddp.strategies.fabric import FabricStrategy

    strategies = import_module(f"{root}.strategies")
    classes = _classes_of_processes(f"{root}.strategies.launchers", fabric=root, module=module)

    # Fabric forbids a plain `loss.backward()` for a strategy that overrides `backward`. Ours works without, and says
    # so by wrapping the original.
    @functools.wraps(strategies.ParallelStrategy.backward)
    def backward(self: Any, *args: Any, **kwargs: Any) -> None:
        FabricStrategy.backward(self, *args, **kwargs)

    of_root = _names_of_root(classes, root, wrapping_checkpoint_io=(), sigterm_exception=None, normal_ends=())
    members = {"root": of_root, "backward": backward}
    strategy = _made("BucketDDPStrategy", module, FabricStrategy, strategies.ParallelStrategy, **members)
    adopt_process_setup(strategy, strategies.DDPStrategy, _FROM_FABRIC)
    return {**classes, "BucketDDPStrategy": strategy}


def _classes_of_processes(launchers: str, *, fabric: str, module: str) -> dict[str, Any]:
    own = import_module(launchers)
    torch_io = import_module(f"{fabric}.plugins.io.torch_io").TorchCheckpointIO
    return {
        "BucketDDPCheckpointIO": _made("BucketDDPCheckpointIO", module, AtomicCheckpointIO, torch_io),
        "_ScriptLauncher": _made("_ScriptLauncher", module, ScriptLauncher, known(own, "_SubprocessScriptLauncher")),
        "_ProcessLauncher": _made("_ProcessLauncher", module, ProcessLauncher, known(own, "_MultiProcessingLauncher")),
    }


def _names_of_root(classes: dict[str, Any], fabric: str, **others: Any) -> SimpleNamespace:
    return SimpleNamespace(
        checkpoint_io=classes["BucketDDPCheckpointIO"],
        script_launcher=classes["_ScriptLauncher"],
        process_launcher=classes["_ProcessLauncher"],
        follow_root=follow_root,
        lightning_environment=import_module(f"{fabric}.plugins.environments.lightning").LightningEnvironment,
        init_dist_connection=known(import_module(f"{fabric}.utilities.distributed"), "_init_dist_connection"),
        **others,
    )


def _made(name: str, module: str, part: type, base: type, **members: Any) -> Any:
    """Return a class of `module` that is `part` before Lightning's `base`."""
    return type(base)(name, (part, base), {"__doc__": part.__doc__, "__module__": module, **members})


def adopt_process_setup(cls: Any, ddp_strategy: Any, names: Iterable[str]) -> None:
    """Have `cls` take over Lightning's own process set-up, and register as a `DDPStrategy`.

    What is taken knows nothing of torch's DistributedDataParallel, and keeps launching, ranks and devices as the
    installed Lightning does them. Inheriting would bring the rest of `DDPStrategy`, which is about the wrapper that we
    do not have. Being a virtual subclass satisfies `isinstance` checks for `torch.compile` and distributed samplers.
    """
    for name in (*_FROM_BOTH, *names):
        known(ddp_strategy, name)
        setattr(cls, name, vars(ddp_strategy)[name])
    abc.update_abstractmethods(cls)
    ddp_strategy.register(cls)
