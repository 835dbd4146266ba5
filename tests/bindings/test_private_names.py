"""Every private name of torch that the package relies on; and that those of Lightning are in one file."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.autograd import Variable
from torchmetrics import MeanMetric

from lightning_bucketddp.bindings.registration import binding_of
from tests.test_architecture import run_time_nodes

PACKAGE = Path(__file__).parents[2] / "lightning_bucketddp"

# By the module, class or object that has them.
TORCH: list[tuple[object, str]] = [
    (torch, "_C _amp_foreach_non_finite_check_and_unscale_ _foreach_copy_ _foreach_mul _foreach_mul_ _foreach_norm"),
    (torch, "_foreach_sub _foreach_zero_ _has_compatible_shallow_copy_type"),
    # Not private by name, but not documented either.
    (torch, "batch_norm_update_stats batch_norm_backward_elemt"),
    (torch.ops.aten, "native_batch_norm_backward"),
    (torch.autograd, "_profiler_enabled"),
    (torch.autograd.grad_mode, "_unsafe_preserve_version_counter"),
    (torch.distributed.distributed_c10d, "_get_default_store _update_default_pg _world"),
    (import_module("torch.distributed.rendezvous"), "_create_c10d_store"),  # beside a function of that name
    (torch.distributed.ProcessGroup, "_allgather_base _get_sequence_number_for_group _reduce_scatter_base"),
    (torch.nn.modules.batchnorm, "_BatchNorm"),
    (torch.nn.parallel.DistributedDataParallel, "_active_ddp_module"),
    (torch.UntypedStorage, "_cdata"),
    (torch._C, "_storage_Use_Count"),
    (torch.Tensor, "_backward_hooks _indices _is_view _post_accumulate_grad_hooks _use_count _values _version"),
    (torch.optim.Optimizer, "_process_value_according_to_param_policy"),
    (torch.optim.SGD([torch.zeros(1)]), "_optimizer_step_post_hooks _optimizer_step_pre_hooks"),
    (torch.nn.Module(), "_backward_pre_hooks _buffers _forward_hooks _forward_pre_hooks _non_persistent_buffers_set"),
    (torch.nn.Module(), "_parameters"),
    (torch.utils.data.DataLoader([0]), "_iterator"),  # type: ignore[arg-type]
    # Made as we make it.
    (
        torch.storage.TypedStorage(wrap_storage=torch.UntypedStorage(4), dtype=torch.int8, _internal=True),
        "_untyped_storage",
    ),
]
OF_TORCH = {name for _, names in TORCH for name in names.split()}
# Builds of torch for CPUs do not have it.
OF_CUDA = {"_cuda_clearCublasWorkspaces"}
# Attributes and methods of Lightning's classes that our classes, which derive from them, override or share.
INHERITED = {
    *("_accelerator", "_backward_sync_control", "_configure_launcher", "_launcher", "_setup_model"),  # by strategies
    *("_call_children_scripts", "_collect_rank_zero_results"),  # by launchers
}
METRICS = {"_computed", "_defaults", "_reductions", "_update_count"}
# Attributes of torch and Hugging Face on objects of users.
OF_USERS = {"_ddp_params_and_buffers_to_ignore", "_distributed", "_orig_mod"}
# Names that look private to the scanner but are ours or the standard library's.
OURS = {
    *("_bucketddp_raised_in", "_even_original", "_sync_original", "_sync_collectives", "_sync_is_idle"),
    *("_typeshed", "_ParallelStrategy", "_TorchCheckpointIO", "_allocate", "_view"),
}
STANDARD = {"__cxa_atexit", "_current_frames", "_exit", "_make", "_replace"}


def test_torch_still_has_them() -> None:
    assert [(owner, name) for owner, names in TORCH for name in names.split() if not hasattr(owner, name)] == []


def test_the_autograd_engine_still_queues_callbacks() -> None:
    assert callable(Variable._execution_engine.queue_callback)


def test_metrics_still_have() -> None:
    assert vars(MeanMetric()).keys() >= METRICS


def private_names(source: str) -> set[str]:
    """Return the private names that are imported from elsewhere, read off something that is not `self`, or strings."""
    found: set[str] = set()
    nodes = run_time_nodes(ast.parse(source))
    texts = [node for node in nodes if isinstance(node, ast.JoinedStr) or _takes_text(node)]
    others = {inner for node in texts for inner in ast.walk(node) if isinstance(inner, ast.Constant)}
    for node in set(nodes) - others:
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_bucketddp"):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.isupper():
            found.add(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update":
            found |= {keyword.arg for keyword in node.keywords if keyword.arg is not None}
    return {name for name in found if re.fullmatch(r"_[a-zA-Z]\w*", name) or re.fullmatch(r"__\w*[^_]", name)}


def _takes_text(node: ast.AST) -> bool:
    """Return whether a call takes strings that are parts of names, or names of types."""
    calls = {"TypeVar", "startswith", "removeprefix"}
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in calls


def shared_with_lightning(cls: type, base: str) -> set[str]:
    """Return the private names that the parts of `cls` which are ours have in common with those from Lightning."""
    ours, theirs = set(), set()
    for part in cls.__mro__:
        if part.__module__.startswith(base):
            theirs |= _names_of(part)
        elif part.__module__.startswith("lightning_bucketddp") and "bindings" not in part.__module__:
            ours |= _names_of(part)
    return {name for name in ours & theirs if name.startswith("_") and not name.endswith("__")} - {"_abc_impl"}


def _names_of(cls: type) -> set[str]:
    nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls))))
    on_self = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"}
    return on_self | vars(cls).keys()


def outside_of_the_place_for_it() -> dict[str, set[str]]:
    """Return by file what is private of Lightning's there, and should be in `trainer_internals` alone."""
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    names = {path: private_names(source) for path, source in sources.items()}
    allowed = {path for path in sources if path == "trainer_internals.py" or path.startswith("bindings/")}
    lightnings = {name for path in allowed for name in names[path]} - OURS - OF_TORCH
    # `object._thing` of our own classes is fine where a class of ours defines it.
    defined = {name for source in sources.values() for name in _defined_on_self(source)}
    listed = {*OF_TORCH, *OF_CUDA, *METRICS, *INHERITED, *OF_USERS, *OURS, *STANDARD}
    unknown = {path: found & lightnings | found - listed - defined for path, found in names.items()}
    return {path: found for path, found in unknown.items() if found and path not in allowed}


def test_only_one_file_names_what_is_private_of_lightning() -> None:
    assert outside_of_the_place_for_it() == {}


@pytest.mark.parametrize("root", ["lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"])
def test_our_classes_share_only_these_names_with_lightnings(root: str) -> None:
    binding = binding_of(root)
    names = ["BucketDDPStrategy", "BucketDDPCheckpointIO", "_ScriptLauncher", "_ProcessLauncher"]
    if "fabric" not in root:
        names += ["BatchSizeFinder", "BucketDDPMonitor", "ScaleLearningRate", "ScalingMonitor", "Tuner"]
    shared = {name for cls in names for name in shared_with_lightning(getattr(binding, cls), root)}
    assert shared <= INHERITED
    assert shared >= {"_setup_model", "_collect_rank_zero_results"} or "fabric" in root


def test_the_scan_sees_every_way_to_name_something() -> None:
    source = """
from lightning.pytorch.loops.loop import _Loop
if TYPE_CHECKING:
    from lightning.pytorch.loops.loop import _Unseen
trainer._one = self._own
setattr(trainer, "_two", getattr(trainer, "_three", None))
vars(trainer).update(_four=vars(trainer)["_five"])
"""
    assert private_names(source) == {"_Loop", "_one", "_two", "_three", "_four", "_five"}


def _defined_on_self(source: str) -> set[str]:
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)
    }
