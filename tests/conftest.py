"""No test may leave anything behind for the next one."""

from __future__ import annotations

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

# Their assertions are those of the tests that call them.
pytest.register_assert_rewrite("tests.support.programs", "tests.support.commands")

from tests.support import warm  # noqa: E402
from tests.support.ranks import close_pools  # noqa: E402

# A background job, or one under `nohup`, is started with signals ignored, and so would be what it starts. A handler,
# even one that does nothing, is not handed down.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

# The files that take longest, so that no worker is alone with one of them at the end. Where processes wait for each
# other, and where they compute, in turns.
_FIRST = (
    *("test_benchmarks.py", "faults/test_soak.py", "faults/test_fault_launchers.py", "faults/test_hosts.py"),
    *("faults/test_faults.py", "bindings/test_autoload.py", "replicas/test_consistency.py"),
    *("faults/test_stop_signals.py", "strategies/test_launchers.py", "reducer/test_plan_tuner.py"),
    *("startup/test_startup.py", "reducer/test_parity.py", "test_documents.py", "strategies/test_notebook.py"),
    *("callbacks/test_large_batch.py", "test_install.py", "test_examples.py", "reducer/test_compile.py"),
)

# Set anew by pytest for each test.
_CHANGES_BY_ITSELF = {"PYTEST_CURRENT_TEST"}


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {Path(__file__).parent / file: number for number, file in enumerate(_FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    sampled = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("long"):
            sampled[item.nodeid.partition("[")[0]].append(item)
    for cases in sampled.values():
        mark_all_but(cases, cases[0].get_closest_marker("sampled").args[0])  # type: ignore[union-attr]


def mark_all_but(cases: list[pytest.Item], number: int) -> None:
    """Mark `cases` as long, but for so many of them, the first one and others at equal distances."""
    kept = {index * len(cases) // number for index in range(number)}
    for index, case in enumerate(cases):
        if index not in kept:
            case.add_marker("long")


def pytest_collection_finish() -> None:
    # All that is imported by now is used to the end: no search for garbage has to look at it.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _environment_stays_as_it_is() -> Iterator[None]:
    before = dict(os.environ)
    yield
    changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
    os.environ.clear()
    os.environ.update(before)
    assert changed <= _CHANGES_BY_ITSELF
    assert not dist.is_initialized()


@pytest.fixture(autouse=True, scope="module")
def _ranks_belong_to_one_file() -> Iterator[None]:
    """Each file has ranks of its own: they are made in a moment, and get slower with all that was done on them."""
    yield
    close_pools()


@pytest.fixture(autouse=True, scope="session")
def _no_process_is_left() -> Iterator[None]:
    yield
    warm.close()
    assert _children() == []


def _children() -> list[str]:
    """The command lines of the processes that this one has started and that still run."""
    commands = [_command_of_child(process) for process in Path("/proc").glob("[0-9]*")]
    # Python's own end with us.
    return [c for c in commands if c and "resource_tracker" not in c and "multiprocessing.forkserver" not in c]


def _command_of_child(process: Path) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):  # it may end while we look
        status = (process / "status").read_text()
        if f"PPid:\t{os.getpid()}\n" in status and "State:\tZ" not in status:
            return (process / "cmdline").read_text().replace("\0", " ")
    return ""
