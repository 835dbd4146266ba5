"""The size of the house, which only shrinks: whoever adds something takes something else away, or changes this file."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_bucketddp import BucketDDPStrategy
from tests.bindings.test_private_names import LIGHTNING, LIGHTNING_ATTRIBUTES

PACKAGE = Path(__file__).parents[1] / "lightning_bucketddp"
FILES = {path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py")}


def count_lines(*, with_commands: bool) -> int:
    return sum(len(text.splitlines()) for path, text in FILES.items() if with_commands or path.parts[0] != "commands")


def own_classes() -> list[type]:
    return [cls for cls in BucketDDPStrategy.__mro__ if cls.__module__.startswith("lightning_bucketddp")]


def files_with_trainer_internals() -> list[str]:
    """Those outside of `bindings` that name something private of Lightning's."""
    private = {name for name in (*LIGHTNING, *LIGHTNING_ATTRIBUTES) if name.startswith("_")}
    found = []
    for path, text in FILES.items():
        nodes = list(ast.walk(ast.parse(text)))
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        if names & private and path.parts[0] != "bindings":
            found.append(str(path))
    return sorted(found)


def null_classes() -> list[str]:
    """Those that stand for a feature which is off."""
    classes = [
        node.name for text in FILES.values() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)
    ]
    return [name for name in classes if re.match(r"_?(No|Null|Equal|Own|Without)[A-Z]", name)]


# What there is at most, and where it shall end.
BUDGET: dict[str, tuple[Callable[[], int], int, int]] = {
    "files": (lambda: len(FILES), 158, 100),
    "lines": (lambda: count_lines(with_commands=True), 25_430, 21_000),
    "lines without commands": (lambda: count_lines(with_commands=False), 22_615, 17_500),
    "options": (lambda: len(inspect.signature(BucketDDPStrategy.__init__).parameters) - 1, 56, 30),
    "own classes of the strategy": (lambda: len(own_classes()), 5, 3),
    "files with Trainer internals": (lambda: len(files_with_trainer_internals()), 17, 1),
    "null classes": (lambda: len(null_classes()), 9, 0),
    "notes": (lambda: sum(len(re.findall(r"^Note: ", text, re.MULTILINE)) for text in FILES.values()), 88, 40),
}


@pytest.mark.parametrize("name", BUDGET)
def test_nothing_grows(name: str) -> None:
    count, at_most, target = BUDGET[name]
    slack = 100 if "lines" in name else 0
    assert count() <= at_most, f"more {name} than before: take something away"
    assert count() >= at_most - slack or at_most <= target, f"fewer {name}: write {count()} here, and keep it"
