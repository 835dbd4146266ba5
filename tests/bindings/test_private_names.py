"""Every private name of torch and Lightning that the package relies on, so that a new version breaks here first."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.autograd import Variable
from torchmetrics import MeanMetric

from lightning_bucketddp.bindings.process_setup import FABRIC_PROCESS_SETUP, TRAINER_PROCESS_SETUP

PACKAGE = Path(__file__).parents[2] / "lightning_bucketddp"

TORCH = {
    "_C": "torch",
    "_BatchNorm": "torch.nn.modules.batchnorm",
    "_create_c10d_store": "torch.distributed.rendezvous",
    "_amp_foreach_non_finite_check_and_unscale_": "torch",
    "_foreach_copy_": "torch",
    "_foreach_mul": "torch",
    "_foreach_norm": "torch",
    "_foreach_mul_": "torch",
    "_foreach_sub": "torch",
    "_foreach_zero_": "torch",
    "_profiler_enabled": "torch.autograd",
    "_get_default_store": "torch.distributed.distributed_c10d",
    "_update_default_pg": "torch.distributed.distributed_c10d",
    "_world": "torch.distributed.distributed_c10d",
    "_unsafe_preserve_version_counter": "torch.autograd.grad_mode",
    # not private by name, but not documented either
    "batch_norm_update_stats": "torch",
    "batch_norm_backward_elemt": "torch",
    "native_batch_norm_backward": "torch.ops.aten",
}
# Used where torch has it; see `_GIVE_BACK_ON`.
NEWER_TORCH = {"_storage_Use_Count"}
TORCH_ATTRIBUTES = {
    "_active_ddp_module": torch.nn.parallel.DistributedDataParallel,
    "_cdata": torch.UntypedStorage,
    "_get_sequence_number_for_group": torch.distributed.ProcessGroup,
    "_indices": torch.Tensor,
    "_optimizer_step_post_hooks": torch.optim.SGD([torch.zeros(1)]),
    "_optimizer_step_pre_hooks": torch.optim.SGD([torch.zeros(1)]),
    "_post_accumulate_grad_hooks": torch.Tensor,
    "_process_value_according_to_param_policy": torch.optim.Optimizer,
    "_use_count": torch.Tensor,
    "_values": torch.Tensor,
    "_version": torch.Tensor,
    # made as we make it
    "_untyped_storage": torch.storage.TypedStorage(
        wrap_storage=torch.UntypedStorage(4), dtype=torch.float32, _internal=True
    ),
}
LAUNCHERS = {
    "_MultiProcessingLauncher": "strategies.launchers",
    "_SubprocessScriptLauncher": "strategies.launchers",
    # overridden by us
    "_call_children_scripts": "strategies.launchers.subprocess_script",
}
LIGHTNING = {
    "_WrappingCheckpointIO": "plugins.io.wrapper",
    "_TunerExitException": "utilities.exceptions",
    "_interrupt": "trainer.call",
}
LIGHTNING_ATTRIBUTES = {
    # written by Lightning's connector
    "_layer_sync": "strategies.parallel",
    "_checkpoint_io": "strategies.strategy",
    # overridden by us
    "_setup_model": "strategies.strategy",
    # replaced by us on the loop of a fit
    "output_result_cls": "loops.optimization.automatic",
    "automatic_optimization": "loops.training_epoch_loop",
    # replaced by us on the loop of a fit that is recorded
    "_on_before_fetch": "loops.training_epoch_loop",
    # asked by us for what a search for a batch size runs, and what its trials are limited by
    "_active_loop": "trainer.trainer",
    "_combined_loader": "loops.fit_loop",
    "_dataset_length": "utilities.combined_loader",
    # answered by us to Lightning's search, and set by it
    "_accelerator_connector": "callbacks.batch_size_finder",
    # asked by us when to log, as Lightning's own monitors do
    "_logger_connector": "trainer.trainer",
    # read and reset by us
    "_error": "plugins.io.async_plugin",
    # replaced by us on the connector of a run
    "_signal_connector": "trainer.trainer",
    "_sigterm_notifier_fn": "trainer.connectors.signal_connector",
    "_slurm_sigusr_handler_fn": "trainer.connectors.signal_connector",
    "received_sigterm": "loops.training_epoch_loop",
    # replaced by us on the connector of a run, and what it gives to samplers
    "_data_connector": "trainer.trainer",
    "_prepare_dataloader": "trainer.connectors.data_connector",
    "distributed_sampler_kwargs": "trainer.connectors.data_connector",
    "_batch_sampler": "overrides.distributed",
    # replaced by us on the connector of a fit, and what it and a tuner know of the user's wishes
    "_checkpoint_connector": "trainer.trainer",
    "resume_start": "trainer.connectors.checkpoint_connector",
    "_user_managed": "trainer.connectors.checkpoint_connector",
    "_early_exit": "callbacks.lr_finder",
    # written by us in a logger of a run that is resumed; `_version` is Fabric's
    "_run_id": "loggers.mlflow",
    "_id": "loggers.wandb",
    "_wandb_init": "loggers.wandb",
    # written by us in a fit that is over
    "min_steps": "loops.training_epoch_loop",
    # corrected by us in a checkpoint that is loaded
    "optim_progress": "loops.optimization.automatic",
    "batch_progress": "loops.training_epoch_loop",
    "epoch_progress": "loops.fit_loop",
    # read by us, of a sampler of the user's
    "_sampler": "overrides.distributed",
    # read by us in an evaluation
    "_results": "trainer.trainer",
    # replaced by us on the loops of an evaluation, and called in what replaces them
    "_evaluation_step": "loops.evaluation_loop",
    "_predict_step": "loops.prediction_loop",
    "_build_kwargs": "loops.prediction_loop",
    "_build_step_args_from_hook_kwargs": "loops.prediction_loop",
    "_on_before_batch_transfer": "loops.prediction_loop",
    "_mode": "utilities.combined_loader",
    # written by us in a prediction
    "_return_predictions": "loops.prediction_loop",
    "_predictions": "loops.prediction_loop",
    # overridden by us
    "_collect_rank_zero_results": "strategies.launchers.multiprocessing",
}
METRICS = {"_computed", "_defaults", "_reductions", "_update_count"}
FABRIC = {"_init_dist_connection": "utilities.distributed"}
FABRIC_ATTRIBUTES = {
    # written by us
    "_version": "loggers.csv_logs",
    "metrics_keys": "loggers.csv_logs",
    "_main_port": "plugins.environments.lightning",
    # written and read by Lightning
    "_backward_sync_control": "strategies.strategy",
    "_convert_stateful_objects_in_state": "strategies.strategy",
    "_checkpoint_io": "strategies.strategy",
}
# In Lightning since 2.6; there is nothing to replace, or to average, before.
NEWER = {"_broadcast_sigterm_tensor", "_average_model"}
# Names that look private to the scanner but are ours or the standard library's.
OURS = {
    "_sync_original",
    "_sync_collectives",
    "_sync_is_idle",
    "_typeshed",
    "_ParallelStrategy",
    "_TorchCheckpointIO",
    "_view",
}
STANDARD = {"__cxa_atexit", "_current_frames", "_exit", "_replace"}


@pytest.mark.parametrize(("name", "module"), TORCH.items())
def test_torch_still_has(name: str, module: str) -> None:
    owner = torch.ops.aten if module == "torch.ops.aten" else import_module(module)
    assert hasattr(owner, name)


@pytest.mark.parametrize(("name", "owner"), TORCH_ATTRIBUTES.items())
def test_torch_classes_still_have(name: str, owner: object) -> None:
    assert hasattr(owner, name)


def test_the_autograd_engine_still_queues_callbacks() -> None:
    assert callable(Variable._execution_engine.queue_callback)


def test_metrics_still_have() -> None:
    assert vars(MeanMetric()).keys() >= METRICS


@pytest.mark.parametrize("root", ["lightning.pytorch", "pytorch_lightning"])
def test_the_trainer_still_has(root: str) -> None:
    for name, module in LIGHTNING.items():
        assert hasattr(import_module(f"{root}.{module}"), name), name
    for name, module in LIGHTNING_ATTRIBUTES.items():
        assert name in inspect.getsource(import_module(f"{root}.{module}")), name
    assert_launchers(root)
    ddp_strategy = import_module(f"{root}.strategies").DDPStrategy
    for name in TRAINER_PROCESS_SETUP:
        assert name in vars(ddp_strategy), name


@pytest.mark.parametrize("root", ["lightning.fabric", "lightning_fabric"])
def test_fabric_still_has(root: str) -> None:
    for name, module in FABRIC.items():
        assert hasattr(import_module(f"{root}.{module}"), name), name
    for name, module in FABRIC_ATTRIBUTES.items():
        assert name in inspect.getsource(import_module(f"{root}.{module}")), name
    assert_launchers(root)
    ddp_strategy = import_module(f"{root}.strategies.ddp").DDPStrategy
    for name in FABRIC_PROCESS_SETUP:
        assert name in vars(ddp_strategy), name


def assert_launchers(root: str) -> None:
    for name, module in LAUNCHERS.items():
        assert name in inspect.getsource(import_module(f"{root}.{module}")), name


def private_names(source: str) -> set[str]:
    """Private names that are imported from elsewhere or read off something that is not `self`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_bucketddp"):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.endswith("__")}


def test_the_list_is_complete() -> None:
    ours = {*OURS, *STANDARD}
    listed = {
        *TORCH,
        *TORCH_ATTRIBUTES,
        *NEWER_TORCH,
        *LAUNCHERS,
        *METRICS,
        *LIGHTNING,
        *LIGHTNING_ATTRIBUTES,
        *FABRIC,
        *FABRIC_ATTRIBUTES,
        *NEWER,
        *ours,
    }
    used = {name for path in PACKAGE.rglob("*.py") for name in private_names(path.read_text())}
    # `object._thing` of our own classes is fine where a class of ours defines it.
    defined = {name for path in PACKAGE.rglob("*.py") for name in _defined_on_self(path.read_text())}
    assert used - listed - defined == set()


def _defined_on_self(source: str) -> set[str]:
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)
    }
