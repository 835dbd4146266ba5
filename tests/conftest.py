"""No test may leave anything behind for the next one."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# Both set filters of warnings and levels of loggers, which the first test to import them would leave behind.
import lightning.pytorch  # noqa: F401
import pytest
import pytorch_lightning  # noqa: F401
import torch

# Their assertions are those of the tests that call them.
pytest.register_assert_rewrite("tests.support.programs")

from tests.support import warm  # noqa: E402
from tests.support.leaks import ProcessState  # noqa: E402
from tests.support.ranks import close_pools, pids_of_pools  # noqa: E402

# As the ranks have: where there are few cores, threads of several workers wait for each other most of the time.
torch.set_num_threads(1)

# A background job, or one under `nohup`, is started with signals ignored, and so would be what it starts. A handler,
# even one that does nothing, is not handed down.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

# The files that take longest, so that no worker is alone with one of them at the end. Where processes wait for each
# other, and where they compute, in turns.
_FIRST = (
    *("strategies/test_max_restarts.py", "strategies/test_cuda_graphs.py", "fuzz/test_fuzz.py"),
    *("test_benchmarks.py", "faults/test_soak.py", "faults/test_fault_launchers.py", "faults/test_hosts.py"),
    *("faults/test_faults.py", "bindings/test_autoload.py", "strategies/test_replica_checks.py"),
    *("faults/test_stop_signals.py", "strategies/test_launchers.py", "reducer/test_plan_tuner.py"),
    *("startup/test_startup.py", "reducer/test_parity.py", "test_documents.py", "strategies/test_notebook.py"),
    *("callbacks/test_large_batch.py", "test_install.py", "test_examples.py"),
    "reducer/test_compile.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", type=int, help="run files, and the tests of each, in a random order")


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("--shuffle")
    return None if seed is None else f"random order: --shuffle={seed}"


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {Path(__file__).parent / file: number for number, file in enumerate(_FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    sampled = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("long"):
            sampled[item.nodeid.partition("[")[0]].append(item)
    for cases in sampled.values():
        mark_all_but(cases, cases[0].get_closest_marker("sampled").args[0])  # type: ignore[union-attr]
    if (seed := config.getoption("--shuffle")) is not None:
        shuffle(items, seed)


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Put files, and the tests of each file, in an order that is the same in all workers."""
    chance = random.Random(seed)
    by_file = defaultdict(list)
    for item in items:
        by_file[item.path].append(item)
    files = list(by_file.values())
    chance.shuffle(files)
    for file in files:
        chance.shuffle(file)
    items[:] = [item for file in files for item in file]


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
def _nothing_is_left_behind() -> Iterator[None]:
    before, variables = ProcessState.now(), dict(os.environ)
    yield
    left_behind = before.left_behind(known_children=_children_of_all_tests)
    # So that one test fails, and not all that follow.
    os.environ.clear()
    os.environ.update(variables)
    assert left_behind == []


@pytest.fixture(autouse=True, scope="module")
def _ranks_belong_to_one_file() -> Iterator[None]:
    """Each file has ranks of its own: they are made in a moment, and get slower with all that was done on them."""
    yield
    close_pools()


@pytest.fixture(autouse=True, scope="session")
def _no_process_is_left() -> Iterator[None]:
    before = ProcessState.now()
    yield
    warm.close()
    assert [line for line in before.left_behind() if line.startswith("child ")] == []


def _children_of_all_tests() -> set[int]:
    """The processes that tests share: ranks, until the last test of a file, and servers to the end."""
    return {*pids_of_pools(), *warm.pids()}
