"""What a test could leave behind in its process, so that a later one meets it.

before = ProcessState.now()
...
assert before.left_behind() == []
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_bucketddp.processes import is_running

# A thread or a process that was told to end may need a moment, on a machine that is busy many.
ENDS_WITHIN_S = 20.0
# Loggers whose settings other tests depend on.
_LOGGERS = ("lightning_bucketddp", "lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")
# pytest sets it anew for each phase of a test.
_CHANGES_BY_ITSELF = {"PYTEST_CURRENT_TEST"}
# Started with the first file that is read through fsspec, or sent to another process, and there to the end.
_THREADS_FOR_GOOD = ("fsspecIO", "(_serve)")
# Not SIGALRM: pytest-timeout stops its clock when a test has failed. Nor SIGCHLD: torch sets a handler with the
# first worker of a DataLoader.
_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGCONT, signal.SIGTSTP, signal.SIGPIPE, signal.SIGWINCH, signal.SIGSEGV, signal.SIGVTALRM),
)
# Python's own, which end with this process.
_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


@dataclass(frozen=True)
class ProcessState:
    """What tests share, as it is at one moment."""

    settings: Mapping[str, Mapping[str, Any]]
    threads: Collection[threading.Thread]
    children: Collection[int]

    @classmethod
    def now(cls) -> ProcessState:
        """Return how it is now."""
        return cls({kind: look() for kind, look in _SETTINGS.items()}, _threads(), _children())

    def left_behind(self, *, known_children: Callable[[], Collection[int]] = set) -> list[str]:
        """Return what has changed since, a line for each; `known_children` may stay."""
        changes = []
        for kind, look in _SETTINGS.items():
            before, after = self.settings[kind], look()
            names = before.keys() | after.keys() if kind in _MAY_NOT_GROW else before.keys()
            changes += [
                f"{kind} {name}: {before.get(name)!r}, now {after.get(name)!r}"
                for name in sorted(names)
                if not _is_same(before.get(name), after.get(name))
            ]
        threads = wait_until_empty(lambda: [thread for thread in _threads() if thread not in self.threads])
        children = wait_until_empty(lambda: sorted(_children() - set(self.children) - set(known_children())))
        changes += [f"thread {thread.name!r}" for thread in threads]
        changes += [f"child {pid}: {_command_line(pid).decode(errors='replace')}" for pid in children]
        return changes


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if not thread.name.endswith(_THREADS_FOR_GOOD)]


def _is_same(before: Any, after: Any) -> bool:
    return type(before) is type(after) and before == after


def wait_until_empty(look: Callable[[], list[Any]]) -> list[Any]:
    deadline = time.monotonic() + ENDS_WITHIN_S
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def _children() -> set[int]:
    """Return the processes that this one has started, by a fork server, too, and that still run."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    own = {pid for pid in found if is_running(pid) and not any(helper in _command_line(pid) for helper in _HELPERS)}
    return own | {pid for process in multiprocessing.active_children() if (pid := process.pid) is not None}


def _command_line(pid: int) -> bytes:
    """Return how a process was started; nothing if it has ended, or is only just starting."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _loggers() -> dict[str, Any]:
    for name in _LOGGERS:
        logging.getLogger(name)  # from the start, whoever is the first to log
    found = {
        name: _logger(one) for name, one in logging.root.manager.loggerDict.items() if isinstance(one, logging.Logger)
    }
    return {**found, "root": _logger(logging.root), "disabled up to": logging.root.manager.disable}


def _logger(logger: logging.Logger) -> tuple[Any, ...]:
    handlers = logger.handlers
    if handlers:  # pytest's own come and go with each phase
        handlers = [handler for handler in handlers if not type(handler).__module__.startswith("_pytest.")]
    return logger.level, list(handlers), list(logger.filters), logger.propagate, logger.disabled


def _signals() -> dict[str, Any]:
    found: dict[str, Any] = {str(int(number)): signal.getsignal(number) for number in _SIGNALS}
    if threading.current_thread() is threading.main_thread():
        found["wakeup descriptor"] = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(found["wakeup descriptor"])
    return found


def _default_device() -> torch.device:
    try:
        return torch.get_default_device()
    except AttributeError:  # torch 2.5, when one was set and taken back
        return torch.device("cpu")


def _torch_defaults() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "device": _default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic algorithms, warning": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled),
        "precision of products": torch.get_float32_matmul_precision(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
    }


def _random_generators() -> dict[str, Any]:
    np_random: Any = np.random
    return {
        "random": (type(random.getstate()), random.getstate()[0], len(random.getstate()[1])),
        "numpy": type(np_random.get_bit_generator()),
        "torch": (type(torch.default_generator), torch.get_rng_state().dtype, torch.get_rng_state().shape),
    }


_SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "variable": lambda: {name: value for name, value in os.environ.items() if name not in _CHANGES_BY_ITSELF},
    "logger": _loggers,
    "warnings": lambda: {"filters": list(warnings.filters)},
    "signal": _signals,
    "torch": _torch_defaults,
    "random numbers": _random_generators,
    "process groups": lambda: {"open": len(dist.distributed_c10d._world.pg_map)},
}
# Importing a module may make loggers; whatever else is new was left behind.
_MAY_NOT_GROW = {"variable"}
