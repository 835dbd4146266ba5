"""The table in docs/compatibility.md names a test for everything that it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "compatibility.md"


def rows(text: str) -> list[list[str]]:
    """The cells of each row, without headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "feature" and set(row[0]) != {"-"}]


def named_tests(cell: str) -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py::\w+)`", cell)


def exists(test: str) -> bool:
    path, _, name = test.partition("::")
    if not (ROOT / path).exists():
        return False
    tree = ast.parse((ROOT / path).read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


@pytest.mark.parametrize("row", rows(TABLE.read_text()), ids=lambda row: row[0])
def test_every_row_names_tests_that_exist(row: list[str]) -> None:
    assert len(row) == 4
    assert named_tests(row[3])
    assert [test for test in named_tests(row[3]) if not exists(test)] == []


def test_a_test_that_is_not_there_is_noticed() -> None:
    assert not exists("tests/strategies/test_compatibility.py::test_nothing")
    assert not exists("tests/test_nothing.py::test_nothing")
    assert named_tests("`tests/test_a.py::test_b`, later") == ["tests/test_a.py::test_b"]
    assert rows("| feature | a |\n|---|---|\n| x | y |") == [["x", "y"]]
