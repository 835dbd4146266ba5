"""The check behind every test notices whatever one could leave to the next."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.support import leaks, warm
from tests.support.cases import for_each
from tests.support.leaks import ProcessState

REPOSITORY = Path(__file__).parents[1]

Leak = Callable[[ExitStack], object]


def change(get: Callable[[], object], set_: Callable[..., object], value: object) -> Leak:
    def leave(undo: ExitStack) -> None:
        undo.callback(set_, get())
        set_(value)

    return leave


LOGGER = logging.getLogger("lightning_bucketddp")
NUMPY_RANDOM: Any = np.random


def leave_handler(undo: ExitStack) -> None:
    handler = logging.NullHandler()
    LOGGER.addHandler(handler)
    undo.callback(LOGGER.removeHandler, handler)


def leave_thread(undo: ExitStack) -> None:
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait, name="left")
    thread.start()
    undo.callback(thread.join)
    undo.callback(is_over.set)


def leave_child(undo: ExitStack) -> None:
    child = subprocess.Popen(["sleep", "60"])
    undo.callback(child.wait)
    undo.callback(child.kill)


def leave_process_group(undo: ExitStack) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    undo.callback(dist.destroy_process_group)


def leave_filter(undo: ExitStack) -> None:
    undo.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")


LEAKS: dict[str, Leak] = {
    "logger lightning_bucketddp:": change(lambda: LOGGER.level, LOGGER.setLevel, logging.ERROR),
    "logger lightning_bucketddp: ": leave_handler,
    "warnings filters:": leave_filter,
    "variable LEFT:": lambda undo: undo.enter_context(patch.dict(os.environ, LEFT="1")),
    "thread 'left'": leave_thread,
    "child ": leave_child,
    f"signal {signal.SIGUSR1:d}:": change(
        lambda: signal.getsignal(signal.SIGUSR1), partial(signal.signal, signal.SIGUSR1), lambda *_: None
    ),
    "process groups open:": leave_process_group,
    "random numbers numpy:": change(NUMPY_RANDOM.get_bit_generator, NUMPY_RANDOM.set_bit_generator, np.random.PCG64()),
}


@for_each("told", LEAKS)
def test_what_is_left_is_told(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "ENDS_WITHIN_S", 0.0)
    before = ProcessState.now()
    assert before.left_behind() == []
    with ExitStack() as undo:
        LEAKS[told](undo)
        [line] = before.left_behind()
        assert line.startswith(told)
    monkeypatch.undo()
    assert before.left_behind() == []


def test_what_may_differ_is_not_told() -> None:
    before = ProcessState.now()
    random.random()
    np.random.rand()
    torch.rand(1)
    logging.getLogger("tests.a_new_one").setLevel(logging.ERROR)
    assert before.left_behind() == []


def test_a_test_that_leaves_something_fails(tmp_path: Path) -> None:
    leaky = "import logging, os\ndef test_level(): logging.getLogger('lightning_bucketddp').setLevel(50)\n"
    leaky += "def test_variable(): os.environ['LEFT'] = '1'\ndef test_nothing(): assert 'LEFT' not in os.environ\n"
    (tmp_path / "test_leaky.py").write_text(leaky)
    command = [warm.python(), "-m", "pytest", "-p", "tests.conftest", "-q", str(tmp_path), "--rootdir", str(tmp_path)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert "test_leaky.py::test_level" in ended.stdout, ended.stdout + ended.stderr
    assert "test_leaky.py::test_variable" in ended.stdout
    assert ended.stdout.rstrip().splitlines()[-1].startswith("3 passed, 2 errors")
