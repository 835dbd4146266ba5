"""The house: a folder imports only folders below it, only bindings import Lightning, few files talk to other ranks."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.cases import for_each

PACKAGE = Path(__file__).parent.parent / "lightning_bucketddp"

# From the bottom to the top.
FOLDERS = [
    "comm",
    "planning",
    "replicas",
    "data",
    "reducer",
    "faults",
    "startup",
    "checkpoint",
    "sharding",
    "local_steps",
    "graphs",
    "recording",
    "commands",
    "strategies",
    "callbacks",
    "bindings",
]
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
# Before there is a process group, about it, and in it.
TALK_TO_OTHER_RANKS = {
    "startup/store.py",
    "comm/process_group.py",
    "comm/collectives.py",
    "callbacks/batch_size_finder.py",
}
# What has to be checked, because it knows torch and must not know more.
_BELOW_LIGHTNING = FOLDERS[: FOLDERS.index("checkpoint")]


def imported_modules(source: str) -> set[str]:
    """Modules that `source` imports at run time."""
    names: set[str] = set()
    for node in run_time_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
    return names


def run_time_nodes(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return [found for child in node.orelse for found in run_time_nodes(child)]
    return [node, *[found for child in ast.iter_child_nodes(node) for found in run_time_nodes(child)]]


def folders_above(folder: str, source: str) -> set[str]:
    """The folders that a file in `folder` imports, but that stand above it."""
    parts = (module.split(".") for module in imported_modules(source) if module.startswith("lightning_bucketddp."))
    imported = {part[1] for part in parts}
    return imported & set(FOLDERS[FOLDERS.index(folder) + 1 :])


def files(folder: str = "") -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


def test_every_folder_has_its_place() -> None:
    assert {path.relative_to(PACKAGE).parts[0] for path in files() if path.parent != PACKAGE} == set(FOLDERS)


@for_each("folder", FOLDERS)
def test_a_folder_imports_only_folders_below_it(folder: str) -> None:
    above = {str(path.relative_to(PACKAGE)): folders_above(folder, path.read_text()) for path in files(folder)}
    assert {path: found for path, found in above.items() if found} == {}


def test_files_that_every_folder_may_import_import_none() -> None:
    beside = {path.stem: imported_modules(path.read_text()) for path in PACKAGE.glob("*.py")}
    of_all = {name for path in files() for name in imported_modules(path.read_text()) if path.parent != PACKAGE}
    imported = {name: beside[name] for name in beside if f"lightning_bucketddp.{name}" in of_all}
    assert imported.keys() >= {"config", "trainer_internals"}
    folders = {f"lightning_bucketddp.{folder}" for folder in FOLDERS}
    assert not {module for found in imported.values() for module in found if module.startswith(tuple(folders))}


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_of_a_folder_import_each_other_in_one_direction(folder: str) -> None:
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in files(folder)}
    imports = {name: imported_modules(path.read_text()) & modules.keys() for name, path in modules.items()}
    assert circle(imports) == []


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, directly or not; none if there are none."""
    left = dict(imports)
    while free := [name for name, found in left.items() if not found & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


@for_each("folder", ["", *FOLDERS])
def test_only_the_bindings_import_lightning(folder: str) -> None:
    paths = files(folder) if folder else sorted(PACKAGE.glob("*.py"))
    roots = {
        name: {module.partition(".")[0] for module in imported_modules(path.read_text())} & set(LIGHTNING)
        for path in paths
        if not (name := str(path.relative_to(PACKAGE))).startswith("bindings/")
    }
    assert {name: found for name, found in roots.items() if found} == {}


@for_each("folder", _BELOW_LIGHTNING)
def test_only_four_files_talk_to_torch_distributed(folder: str) -> None:
    for path in files(folder):
        if str(path.relative_to(PACKAGE)) not in TALK_TO_OTHER_RANKS:
            assert not {m for m in imported_modules(path.read_text()) if m.startswith("torch.distributed")}, path
            assert "torch.distributed." not in "".join(line.partition("#")[0] for line in _code_lines(path)), path


def _code_lines(path: Path) -> list[str]:
    """Return the lines of a file without its docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return [line for line in ast.unparse(tree).splitlines() if line != "pass"]


def test_the_map_for_newcomers_is_right() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| .*\? \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        place = re.fullmatch(r"`([\w/]+\.py)`, `([\w.]+)`", row)
        assert place is not None, row
        assert re.search(rf"\b{re.escape(place[2])}\b", (PACKAGE / place[1]).read_text()), row


def test_the_rules_can_fail() -> None:
    assert imported_modules("from torch.distributed import all_reduce\nimport lightning.pytorch as pl") == {
        "torch.distributed",
        "lightning.pytorch",
    }
    assert imported_modules("if TYPE_CHECKING:\n    import lightning") == set()
    assert folders_above("comm", "from lightning_bucketddp.reducer.bucket import Bucket") == {"reducer"}
    assert folders_above("reducer", "from lightning_bucketddp.comm.collectives import Collectives") == set()
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["a", "b", "c"]
    assert circle({"a": {"b"}, "b": set()}) == []


def notes_in(source: str) -> list[str]:
    """Return the titles of the notes in the docstring of a module."""
    return re.findall(r"^Note: (.+)$", ast.get_docstring(ast.parse(source)) or "", re.MULTILINE)


def notes_cited(source: str) -> list[tuple[str, str]]:
    """Return title and module of the notes that `source` cites; an empty string where it names only one of the two."""
    text = re.sub(r"\s+(# )?", " ", source)
    groups = re.findall(r'(?:\(|""")Note: ([^()"]*?)\.?(?:\)|""")', text)
    cited = [re.fullmatch(r"(.*?)(?:, in `(\w+)`)?", title) for group in groups for title in group.split(", Note: ")]
    by_module = re.findall(r"(?:see|is) the note in `(\w+)`", text)
    return [(found[1], found[2] or "") for found in cited if found] + [("", module) for module in by_module]


def missing_notes(sources: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return path, title and module of each citation, in files by path, that leads to no note."""
    notes = {(title, Path(path).stem) for path, source in sources.items() for title in notes_in(source)}
    known = notes | {(title, "") for title, _ in notes} | {("", module) for _, module in notes}
    return [(path, *cited) for path, source in sources.items() for cited in notes_cited(source) if cited not in known]


def test_notes_that_are_cited_exist_and_have_titles_of_their_own() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in files()}
    assert missing_notes(sources) == []
    titles = Counter(title for source in sources.values() for title in notes_in(source))
    assert {title for title, number in titles.items() if number > 1} == set()


def test_a_citation_of_a_missing_note_is_found() -> None:
    noted = '"""A module.\n\nNote: order\n    By index.\n"""'
    citing = "# First (Note: order, in `noted`), then (Note:\n# order, Note: orders); see the note in `other`."
    assert notes_in(noted) == ["order"]
    assert notes_cited(citing) == [("order", "noted"), ("order", ""), ("orders", ""), ("", "other")]
    assert notes_cited('"""Note: order."""') == [("order", "")]
    missing = [("citing.py", "orders", ""), ("citing.py", "", "other")]
    assert missing_notes({"core/noted.py": noted, "citing.py": citing}) == missing
    assert missing_notes({"core/moved.py": noted, "citing.py": citing})[0] == ("citing.py", "order", "noted")
