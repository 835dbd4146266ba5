"""The import rule: a part knows only what stands before it, and only three files talk to `torch.distributed`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_bucketddp"

CORE_ORDER = [
    "config",
    "compiled",
    "profiling",
    "capture",
    "plan",
    "cost",
    "profile",
    "timeline",
    "optimum",
    "prediction",
    "arrivals",
    "bucket",
    "single_buckets",
    "flags",
    "placement",
    "hooks",
    "network",
    "sockets",
    "meeting_point",
    "invitation",
    "rendezvous",
    "process_group",
    "collectives",
    "failure",
    "whereabouts",
    "connections",
    "peers",
    "side_channel",
    "neighbours",
    "stalls",
    "signal_wakeup",
    "termination",
    "watch",
    "wire",
    "clock",
    "observer",
    "cost_meter",
    "tuning",
    "stats",
    "lockstep",
    "weighting",
    "replicas",
    "fingerprint",
    "training_state",
    "divergence",
    "nonfinite",
    "recorder",
    "reductions",
    "backward_pass",
    "plans",
    "reducer",
    "sync_batchnorm",
]
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
# The files that bind shared code to one root of Lightning.
BINDINGS = {
    "strategies/trainer_lightning.py",
    "strategies/trainer_pytorch_lightning.py",
    "strategies/fabric_lightning.py",
    "strategies/fabric_lightning_fabric.py",
    "checkpoint/lightning_io.py",
    "checkpoint/lightning_fabric_io.py",
    "callbacks/lightning_callbacks.py",
    "callbacks/pytorch_lightning_callbacks.py",
}


def imported_modules(source: str) -> set[str]:
    """Modules that `source` imports at run time."""
    names: set[str] = set()
    for node in _run_time_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
    return names


def _run_time_nodes(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return [found for child in node.orelse for found in _run_time_nodes(child)]
    return [node, *[found for child in ast.iter_child_nodes(node) for found in _run_time_nodes(child)]]


def files(folder: str = "") -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


def test_every_core_file_has_its_place_in_the_order() -> None:
    assert {path.stem for path in files("core")} == {"__init__", *CORE_ORDER}


@pytest.mark.parametrize("name", CORE_ORDER)
def test_core_files_import_only_what_stands_before_them(name: str) -> None:
    imported = imported_modules((PACKAGE / "core" / f"{name}.py").read_text())
    ours = {module.removeprefix("lightning_bucketddp.core.") for module in imported if "lightning_bucketddp" in module}
    assert ours <= set(CORE_ORDER[: CORE_ORDER.index(name)])


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_bindings_import_lightning(path: Path) -> None:
    roots = {module.partition(".")[0] for module in imported_modules(path.read_text())}
    if str(path.relative_to(PACKAGE)) not in BINDINGS:
        assert not roots & set(LIGHTNING)


@pytest.mark.parametrize("path", files("core"), ids=lambda path: path.name)
def test_only_three_files_talk_to_torch_distributed(path: Path) -> None:
    # Before there is a process group, about it, and in it.
    if path.stem not in ("meeting_point", "process_group", "collectives"):
        assert not {module for module in imported_modules(path.read_text()) if module.startswith("torch.distributed")}
        assert "torch.distributed." not in "".join(line.partition("#")[0] for line in _code_lines(path))


def _code_lines(path: Path) -> list[str]:
    """The file without its docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).splitlines()


def test_the_rule_can_fail() -> None:
    assert imported_modules("from torch.distributed import all_reduce\nimport lightning.pytorch as pl") == {
        "torch.distributed",
        "lightning.pytorch",
    }
    assert imported_modules("if TYPE_CHECKING:\n    import lightning") == set()
