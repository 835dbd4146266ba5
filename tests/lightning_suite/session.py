"""One session of pytest, with Lightning's `ddp` or with `bucketddp` in its place.

Run as the main module. Ranks that a test spawns import the main module of their parent, and ranks that it launches as
scripts run that module again, so the strategy is replaced in them, too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

STRATEGY = "LIGHTNING_SUITE_STRATEGY"
RECORD = "LIGHTNING_SUITE_RECORD"
_ROOTS = ("lightning.pytorch", "lightning.fabric")
# A rank that was launched as a script: the test that launched it. pytest sets the variable anew for each test.
_LAUNCHED_BY = os.environ.get("PYTEST_CURRENT_TEST") if "LOCAL_RANK" in os.environ else None


def ddp_class(root: str) -> Any:
    return import_module(f"{root}.strategies.ddp").DDPStrategy


def replace_ddp(root: str) -> None:
    """Have the names and the class of Lightning's `ddp` mean ours, for all that is imported from now on."""
    from lightning_bucketddp.bindings.registration import register, strategy_class

    register(root)
    ours = strategy_class(root)
    strategies = import_module(f"{root}.strategies")
    strategies.DDPStrategy = import_module(f"{root}.strategies.ddp").DDPStrategy = ours  # type: ignore[attr-defined]
    registry = strategies.STRATEGY_REGISTRY if "fabric" in root else strategies.StrategyRegistry
    for name in [name for name in registry if name.startswith("ddp")]:
        registry[name] = registry[f"bucket{name}"]


class Recorder:
    """Writes down how each test ends, on every rank that is a session of its own, and which strategies it made."""

    def __init__(self) -> None:
        self._made: list[str] = []
        for root in _ROOTS:
            self._note_new(ddp_class(root))

    def _note_new(self, strategy: Any) -> None:
        init: Callable[..., None] = strategy.__init__

        @wraps(init)
        def noting(this: Any, *args: Any, **kwargs: Any) -> None:
            self._made.append(f"{strategy.__module__}.{strategy.__name__}")
            init(this, *args, **kwargs)

        strategy.__init__ = noting

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if _LAUNCHED_BY is not None:
            chosen = [item for item in items if f"{item.nodeid} (call)" == _LAUNCHED_BY]
        else:
            chosen = [item for item in items if "ddp" in item.path.read_text().lower()]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._made.clear()
        self._write(item.nodeid, outcome="died")
        yield

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Of a test that passes only the end is of interest: what it left behind is looked at there.
        if not report.passed or report.when == "teardown":
            self._write(report.nodeid, outcome=report.outcome, why=_why(report))

    def pytest_sessionfinish(self) -> None:
        if _LAUNCHED_BY is None:
            Path(os.environ[RECORD]).with_suffix(".finished").touch()

    def _write(self, test: str, *, outcome: str, why: str = "") -> None:
        line = {"test": test, "outcome": outcome, "why": why, "made": self._made, "launched": _LAUNCHED_BY is not None}
        with Path(os.environ[RECORD]).open("a") as file:
            file.write(f"{json.dumps(line)}\n")


def _why(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    return report.longreprtext.strip().rpartition("\nE  ")[2].strip() if report.failed else ""


if os.environ.get(STRATEGY) == "bucketddp":
    for _root in _ROOTS:
        replace_ddp(_root)

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:], plugins=[Recorder()]))
