"""The size of the house, which only shrinks: whoever adds something takes something else away, or changes this file."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_bucketddp import BucketDDPStrategy
from tests.bindings.test_private_names import outside_of_the_place_for_it

PACKAGE = Path(__file__).parents[1] / "lightning_bucketddp"
FILES = {path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py")}


def count_lines(*, with_commands: bool) -> int:
    return sum(len(text.splitlines()) for path, text in FILES.items() if with_commands or path.parts[0] != "commands")


def own_classes() -> list[type]:
    return [cls for cls in BucketDDPStrategy.__mro__ if cls.__module__.startswith("lightning_bucketddp")]


def null_classes() -> list[str]:
    """Those that stand for a feature which is off."""
    classes = [
        node.name for text in FILES.values() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)
    ]
    return [name for name in classes if re.match(r"_?(No|Null|Equal|Own|Without)[A-Z]", name)]


# What there is at most, and where it shall end.
BUDGET: dict[str, tuple[Callable[[], int], int, int]] = {
    "files": (lambda: len(FILES), 105, 105),
    "lines": (lambda: count_lines(with_commands=True), 24_231, 22_400),
    "lines without commands": (lambda: count_lines(with_commands=False), 21_689, 18_900),
    "options": (lambda: len(inspect.signature(BucketDDPStrategy.__init__).parameters) - 1, 32, 32),
    "own classes of the strategy": (lambda: len(own_classes()), 3, 3),
    "files with Trainer internals": (lambda: 1 + len(outside_of_the_place_for_it()), 1, 1),
    "null classes": (lambda: len(null_classes()), 0, 0),
    "notes": (lambda: sum(len(re.findall(r"^Note: ", text, re.MULTILINE)) for text in FILES.values()), 40, 40),
}


@pytest.mark.parametrize("name", BUDGET)
def test_nothing_grows(name: str) -> None:
    count, at_most, target = BUDGET[name]
    slack = 100 if "lines" in name else 0
    assert count() <= at_most, f"more {name} than before: take something away"
    assert count() >= at_most - slack or at_most <= target, f"fewer {name}: write {count()} here, and keep it"
