"""What `pip install` puts on a machine, and that it is enough."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

import lightning_bucketddp
from tests.dist import package_files, surprises_in_wheel

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    quiet = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", REPOSITORY, *quiet, "--wheel-dir", folder], check=True)
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed package and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)  # `make dist` has pip install it
    return folder


def test_the_wheel_holds_the_package_the_autoload_file_and_the_licence(wheel: Path) -> None:
    package = package_files()
    assert surprises_in_wheel(wheel, package) == set()
    typed = "lightning_bucketddp/py.typed"
    assert surprises_in_wheel(wheel, package - {typed}) == {typed}


def test_the_metadata_says_what_it_needs_and_where_it_is_found(installed: Path) -> None:
    (distribution,) = distributions(path=[str(installed)])
    assert {(entry_point.group, entry_point.name): entry_point.value for entry_point in distribution.entry_points} == {
        ("torch.backends", "bucketddp"): "lightning_bucketddp_autoload:autoload",
        ("console_scripts", "bucketddp"): "lightning_bucketddp.cli:main",
    }
    required = [line for line in distribution.requires or [] if "extra" not in line]
    assert sorted(required, key=str.lower) == [
        "fsspec",
        "lightning!=2.6.2,!=2.6.3,>=2.5",
        "lightning-utilities",
        "numpy",
        "pyyaml",
        "rich",
        "torch>=2.5",
        "torchmetrics",
        "typing-extensions",
    ]
    assert distribution.version == lightning_bucketddp.__version__


def imported_modules() -> set[str]:
    """The first names of all modules that the package imports, wherever in a file it does."""
    names: set[str] = set()
    for path in [*(REPOSITORY / "lightning_bucketddp").rglob("*.py"), REPOSITORY / "lightning_bucketddp_autoload.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
                names.add(node.module.partition(".")[0])
    return names


def test_what_is_imported_is_declared(installed: Path) -> None:
    (distribution,) = distributions(path=[str(installed)])
    required = [line for line in distribution.requires or [] if "extra" not in line]
    declared = {re.split(r"[<>=!]", line)[0].lower() for line in required}
    ours = {"lightning_bucketddp", "lightning_bucketddp_autoload"}
    # Each is imported only where a program has imported it before, or for a type checker alone.
    of_the_user = {"omegaconf", "jsonargparse", "_typeshed"}
    names = imported_modules() - sys.stdlib_module_names - ours - of_the_user
    assert of_the_user < imported_modules()
    # Not `packages_distributions`, which knows few of them on Python 3.10.
    records = {it.name: (it.read_text("RECORD") or "").splitlines() for it in distributions()}  # `files` looks at each
    found = {re.split("[/,]", line)[0].removesuffix(".py"): name for name, lines in records.items() for line in lines}
    assert {found[name].lower().replace("_", "-") for name in names} == declared
