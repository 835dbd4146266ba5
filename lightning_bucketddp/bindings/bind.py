"""Make our classes for one root of Lightning: each root defines classes of its own, and accepts only those."""

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

# By public name of a callback or the tuner: our file and class, and the module and name of its Lightning base class.
_CALLBACKS = {
    "BatchSizeFinder": ("batch_size_finder", "SharedBatchSizeFinder", "callbacks", "BatchSizeFinder"),
    "BucketDDPMonitor": ("monitor", "StepMonitoring", "callbacks", "Callback"),
    "ScaleLearningRate": ("scaling", "LearningRateScaling", "callbacks", "Callback"),
    "ScalingMonitor": ("scaling", "ScalingMeasurement", "callbacks", "Callback"),
    "Tuner": ("batch_size_finder", "SharedTuner", "tuner", "Tuner"),
}

# Members that a strategy takes from Lightning's `DDPStrategy`: from both, from that of the Trainer, and from Fabric's.
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
    """Return the callback `name` of `module` for `root`; it is made on demand, because that imports much."""
    if name not in _CALLBACKS:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    file, part_name, base_module, base_name = _CALLBACKS[name]
    part = getattr(import_module(f"lightning_bucketddp.callbacks.{file}"), part_name)
    base = getattr(import_module(f"{root}.{base_module}"), base_name)
    return _made(name, module, part, base, _binding=module, lightning_base=base)


def bind_trainer(root: str, *, fabric: str, module: str) -> dict[str, type]:
    """Return the classes that `module` defines for the Trainer of `root`."""
    from lightning_bucketddp.strategies.trainer import TrainerStrategy

    strategies = import_module(f"{root}.strategies")
    exceptions = import_module(f"{root}.utilities.exceptions")
    classes, of_root = _bind_processes(root, fabric=fabric, module=module)
    of_root.interrupt = known(import_module(f"{root}.trainer.call"), "_interrupt")
    classes["_ProcessLauncher"].on_exception_of = staticmethod(of_root.interrupt)
    of_root.wrapping_checkpoint_io = known(import_module(f"{root}.plugins.io.wrapper"), "_WrappingCheckpointIO")
    of_root.async_checkpoint_io = import_module(f"{root}.plugins.io").AsyncCheckpointIO
    of_root.torch_sync_batchnorm = import_module(f"{root}.plugins.layer_sync").TorchSyncBatchNorm
    of_root.callback = import_module(root).Callback
    of_root.reduce = strategies.DDPStrategy.reduce
    of_root.batch_size_of = import_module(f"{root}.utilities.data").extract_batch_size
    of_root.is_oom_error = import_module(f"{root}.utilities.memory").is_oom_error
    # The exceptions of a Trainer that SIGTERM stops, and of a tuner that has ended.
    of_root.sigterm_exception = exceptions.SIGTERMException
    of_root.normal_ends = (known(exceptions, "_TunerExitException"),)
    strategy = _made("BucketDDPStrategy", module, TrainerStrategy, strategies.ParallelStrategy, root=of_root)
    adopt_process_setup(strategy, strategies.DDPStrategy, _FROM_TRAINER)
    accept_in_every_root(TrainerStrategy)
    return {**classes, "BucketDDPStrategy": strategy}


def bind_fabric(root: str, *, module: str) -> dict[str, type]:
    """Return the classes that `module` defines for the Fabric of `root`."""
    from lightning_bucketddp.strategies.fabric import FabricStrategy

    strategies = import_module(f"{root}.strategies")
    classes, of_root = _bind_processes(root, fabric=root, module=module)
    of_root.wrapping_checkpoint_io, of_root.sigterm_exception, of_root.normal_ends = (), None, ()

    # Fabric forbids a plain `loss.backward()` for a strategy that overrides `backward`, unless it wraps the original.
    @functools.wraps(strategies.ParallelStrategy.backward)
    def backward(self: Any, *args: Any, **kwargs: Any) -> None:
        FabricStrategy.backward(self, *args, **kwargs)

    members = {"root": of_root, "backward": backward}
    strategy = _made("BucketDDPStrategy", module, FabricStrategy, strategies.ParallelStrategy, **members)
    adopt_process_setup(strategy, strategies.DDPStrategy, _FROM_FABRIC)
    return {**classes, "BucketDDPStrategy": strategy}


def _bind_processes(root: str, *, fabric: str, module: str) -> tuple[dict[str, Any], SimpleNamespace]:
    """Return the classes besides the strategy, and the names of `root` that a strategy needs (`StrategyBase.root`)."""
    launchers = import_module(f"{root}.strategies.launchers")
    script = known(launchers, "_SubprocessScriptLauncher")
    multiprocessing = known(launchers, "_MultiProcessingLauncher")
    torch_io = import_module(f"{fabric}.plugins.io.torch_io").TorchCheckpointIO
    of_root = SimpleNamespace(
        checkpoint_io=_made("BucketDDPCheckpointIO", module, AtomicCheckpointIO, torch_io),
        script_launcher=_made("_ScriptLauncher", module, ScriptLauncher, script),
        process_launcher=_made("_ProcessLauncher", module, ProcessLauncher, multiprocessing),
        follow_root=follow_root,
        lightning_environment=import_module(f"{fabric}.plugins.environments.lightning").LightningEnvironment,
        init_dist_connection=known(import_module(f"{fabric}.utilities.distributed"), "_init_dist_connection"),
    )
    classes = (of_root.checkpoint_io, of_root.script_launcher, of_root.process_launcher)
    return {cls.__name__: cls for cls in classes}, of_root


def _made(name: str, module: str, part: type, base: type, **members: Any) -> Any:
    """Return a class of `module` that is `part` before Lightning's `base`."""
    return type(base)(name, (part, base), {"__doc__": part.__doc__, "__module__": module, **members})


def adopt_process_setup(cls: Any, ddp_strategy: Any, names: Iterable[str]) -> None:
    """Give `cls` the methods of Lightning's own process set-up, and register it as a `DDPStrategy`.

    They do not depend on torch's DistributedDataParallel, and keep launching, ranks and devices as in the installed
    Lightning. Inheriting would bring the rest of `DDPStrategy`, which is about that wrapper. A virtual subclass passes
    the `isinstance` checks of `torch.compile` and distributed samplers.
    """
    for name in (*_FROM_BOTH, *names):
        known(ddp_strategy, name)
        setattr(cls, name, vars(ddp_strategy)[name])
    abc.update_abstractmethods(cls)
    ddp_strategy.register(cls)
