"""Processes of this host: whether they run, which is which, who started this one, their variables; worker threads."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from lightning_utilities.core import rank_zero

from lightning_bucketddp.wording import wrap

_ROOT = Path("/")
# In a line of /proc/self/maps; and a constant of OpenMP's.
_OPENMP = re.compile(r"/\S*/lib(?:g|i)?omp\S*\.so\S*")
_OMP_PAUSE_HARD = 2


def is_running(pid: int, *, start_time: int | None = None) -> bool:
    """Return whether process `pid` runs; with a `start_time`, whether it still is the process that began then."""
    try:
        os.kill(pid, 0)  # asks; /proc alone may hide the processes of other users
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process_state(pid) not in ("Z", "X") if start_time is None else process_start_time(pid) == start_time


def process_state(pid: int) -> str:
    """Return the state of process `pid` as in `ps`, such as "T" (stopped) or "Z" (zombie); "" if it is not known."""
    return next(iter(_stat_fields(pid)), "")


def process_start_time(pid: int) -> int:
    """Return when process `pid` was started, in ticks since the boot; 0 if it is a zombie or not known."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else 0


def working_directory(pid: int) -> str:
    """Return where process `pid` works; if that is not known, where this one does."""
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return os.getcwd()


def _stat_fields(pid: int) -> list[str]:
    with suppress(OSError):
        # They are counted from behind the name, which is in parentheses and may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def boot_id(*, root: Path = _ROOT) -> str:
    """Return the kernel's id of this boot; "" if it has none."""
    with suppress(OSError):
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def pid_scope() -> str:
    """Return an id of this boot and PID namespace, in which process numbers mean the same; random if not known."""
    boot, namespace = boot_id(), ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")  # containers have their own
    identity = f"{boot}\n{namespace}".encode() if boot and namespace else secrets.token_bytes()
    return hashlib.blake2b(identity, digest_size=8).hexdigest()


def is_launched_by_torchrun() -> bool:
    """Return whether torchrun's agent (torchelastic) is the parent of this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def agent_holds_store() -> bool:
    """Return whether torchrun's agent holds the store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@contextmanager
def variables_by_default(values: Mapping[str, str]) -> Iterator[None]:
    """Set those of `values` that are not set in the environment, and unset them at the end of the block."""
    missing = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def end_openmp_threads() -> bool:
    """End the idle threads of OpenMP in this process; the next operation that needs them starts new ones.

    No thread survives a fork, and a forked process of GNU's OpenMP waits for those of its parent for ever. Return False
    if that is older than OpenMP 5.0, and cannot end them (torch 2.5 and 2.6 on x86-64).
    """
    try:
        loaded = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux
        return True
    libraries = [ctypes.CDLL(path) for path in set(_OPENMP.findall(loaded)) if os.path.exists(path)]
    able = [library for library in libraries if hasattr(library, "omp_pause_resource_all")]
    for library in able:
        library.omp_pause_resource_all(_OMP_PAUSE_HARD)
    return able == libraries


def end_with_status(status: int) -> None:
    """Make this process end with `status` after everything that Python does at its end."""
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc._exit, ctypes.c_void_p(status), None)


_log = logging.getLogger("lightning_bucketddp")


def rank_zero_info(text: str) -> None:
    """Log `text` where Lightning logs, unless the user has set the logger `lightning_bucketddp` to a higher level."""
    if _log.level <= logging.INFO:
        rank_zero.rank_zero_info(wrap(text))


def rank_zero_warn(text: str) -> None:
    """Warn on rank zero."""
    rank_zero.rank_zero_warn(wrap(text), stacklevel=5)  # the line that calls this


_Result = TypeVar("_Result")


class WorkerThread(threading.Thread):
    """The thread of a `Worker`."""


class Worker:
    """Calls functions in a thread of its own, in the order in which they are submitted.

    With `stops_at_error`, all functions after one that has failed fail by the same error: their collectives would not
    match those of other ranks. A thread that waits for a rank that is gone ends with the process.
    """

    def __init__(self, name: str, *, stops_at_error: bool = True) -> None:
        self._given: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        # Not a method, which would keep this object alive: garbage collection ends a worker that was not closed.
        self._thread = WorkerThread(target=_work, args=(self._given, stops_at_error), name=name, daemon=True)
        self._thread.start()
        self._last: Future[Any] | None = None
        self._end = weakref.finalize(self, self._given.put, None)

    def submit(self, function: Callable[[], _Result]) -> Future[_Result]:
        """Call `function` after all that were submitted before."""
        self._last = future = Future[_Result]()
        self._given.put((function, future))
        return future

    def close(self) -> None:
        """Accept no more functions. The thread ends when it has called all; this waits for it only if it has."""
        self._end()
        if self._last is None or self._last.done():
            self._thread.join()


def _work(given: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None], stops_at_error: bool) -> None:
    failure: BaseException | None = None
    while (next_one := given.get()) is not None:
        function, future = next_one
        try:
            if failure is not None and stops_at_error:
                raise failure
            future.set_result(function())
        except Exception as error:
            failure = error
            future.set_exception(error)
        del next_one, function, future  # tensors hang on them
