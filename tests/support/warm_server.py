"""The server of `tests/support/warm.py`: has imported what programs import, and forks one for each client that asks.

A child leaves the loop, becomes what a fresh interpreter would be, and runs the script from the bottom of this file, so
that Python itself deals with how it ends. Only what all share is not taken apart: to touch that memory would copy it.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import resource
import selectors
import signal
import socket
import sys
import types
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.warm import NO_RUN, RUN_VARIABLE

IMPORTED = {
    "lightning": (
        "lightning.pytorch.cli",
        "lightning.fabric",
        "pytorch_lightning.cli",
        "lightning_fabric",
        "torch.distributed.run",
        "lightning_bucketddp.bindings.trainer_lightning",
        "lightning_bucketddp.bindings.trainer_pytorch_lightning",
        "lightning_bucketddp.bindings.fabric_lightning",
        "lightning_bucketddp.bindings.fabric_lightning_fabric",
        "lightning_bucketddp.cli",
    ),
    "torch": ("torch._dynamo", "torch.distributed.fsdp", "torchmetrics", "rich.progress", "jsonargparse"),
}
# Those of a program: they may hold process groups, files and threads, which end with them.
TAKEN_APART = (
    *(
        "lightning",
        "pytorch_lightning",
        "lightning_fabric",
        "lightning_bucketddp",
        "torch.distributed.distributed_c10d",
    ),
    *("sys", "builtins", "threading", "__main__"),  # Python looks for these by name
)
# Variables that are read while Python starts or modules are imported.
PREFIXES = ("PYTHON", "LD_", "TORCHDYNAMO", "TORCH_DEVICE_BACKEND", "TORCH_LOGS", "BUCKETDDP_AUTOLOAD", "CUDA_")
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)
NAMESPACES = ("user", "net", "mnt", "uts", "ipc", "pid")
_ABOVE_ALL = 500
_libc = ctypes.CDLL(None, use_errno=True)


def serve(directory: Path) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request. Returns in such a process, with what it shall be and its open files."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "socket"))
    listener.listen(64)
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ, None)
        selector.register(listener, selectors.EVENT_READ, None)
        children: dict[int, tuple[int, socket.socket]] = {}  # by descriptor of the process
        print("ready", flush=True)
        while True:
            for key, _ in selector.select():
                if key.fd == 0:
                    for pid, _client in children.values():
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                elif key.fileobj is listener:
                    client, _ = listener.accept()
                    try:
                        request, descriptors = _receive(client)
                    except (OSError, ValueError):  # it was killed before it had said what it wants
                        client.close()
                        continue
                    pid = os.fork()
                    if pid == 0:
                        return request, descriptors
                    for descriptor in descriptors:
                        os.close(descriptor)
                    with suppress(OSError):  # it may have been killed since: its end is noticed below
                        client.sendall(f"{pid}\n".encode())
                    watched = os.pidfd_open(pid)
                    children[watched] = (pid, client)
                    selector.register(watched, selectors.EVENT_READ, None)
                    selector.register(client, selectors.EVENT_READ, pid)
                elif key.data is None:
                    pid, client = children.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _, status = os.waitpid(pid, 0)
                    with suppress(OSError):  # it may have been killed
                        client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                    with suppress(KeyError, ValueError):
                        selector.unregister(client)
                    client.close()
                else:  # the client has been killed, and with it what stands behind it
                    with suppress(KeyError, ValueError, ProcessLookupError):  # which may have ended just now
                        selector.unregister(key.fileobj)
                        os.kill(key.data, signal.SIGKILL)


def _receive(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    size, descriptors, _, _ = socket.recv_fds(client, 8, 250)
    with client.makefile("rb") as file:
        return json.loads(file.read(int.from_bytes(size, "little"))), descriptors


def become(request: dict[str, Any], descriptors: list[int], state: dict[str, Any]) -> None:
    """Be like a fresh process with the arguments, environment and files of the client."""
    _take_files(request, descriptors)
    os.chdir(request["directory"])
    os.umask(request["umask"])
    for which, limit in zip(LIMITS, request["limits"], strict=True):
        resource.setrlimit(which, tuple(limit))
    # Python itself ignores two.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else default)
    os.environ.clear()
    os.environ.update(request["environment"])
    is_unbuffered = request["is_unbuffered"] or bool(os.environ.get("PYTHONUNBUFFERED"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or os.isatty(1), write_through=is_unbuffered)  # type: ignore[union-attr]
    if request["ignores_warnings"]:
        sys.warnoptions.append("ignore")
        warnings.simplefilter("ignore")
    if os.environ.get("PYTHONPATH") != state["variables"].get("PYTHONPATH"):
        sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.getppid = parent_of(request["client"])
    # What imports have set from the environment, or at random.
    np.random.seed()
    if rank_zero := sys.modules.get("lightning.fabric.utilities.rank_zero"):
        rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def parent_of(client: int) -> Callable[[], int]:
    """`os.getppid` for us: the process that has started the client, until it ends; ours is the server."""
    ours, getppid = os.getpid(), os.getppid

    def parent() -> int:
        if os.getpid() != ours:  # in a process that the script has forked
            return getppid()
        with suppress(OSError):  # the client was killed, and so are we at once
            return int(Path(f"/proc/{client}/stat").read_text().rpartition(")")[2].split()[1])
        return 1

    return parent


def _take_files(request: dict[str, Any], descriptors: list[int]) -> None:
    # Out of the way of the numbers that they shall have.
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _ABOVE_ALL) for descriptor in descriptors]
    os.closerange(3, _ABOVE_ALL)
    numbers = request["descriptors"]
    for namespace in kept[len(numbers) :]:
        if _libc.setns(namespace, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    for number in {0, 1, 2} - set(numbers):
        os.close(number)
    for number, descriptor in zip(numbers, kept, strict=False):
        os.dup2(descriptor, number)
    for descriptor in kept:
        os.close(descriptor)


def place_of_run() -> int:
    """Where in our memory is what `/proc` shows as `RUN_VARIABLE`."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    return (
        begin + ctypes.string_at(begin, end - begin).index(f"{RUN_VARIABLE}={NO_RUN}".encode()) + len(RUN_VARIABLE) + 1
    )


def spare(shared: dict[str, types.ModuleType]) -> None:
    """Keep the end of Python from taking `shared` apart, and what follows it from doing so with torch's libraries."""
    for name in shared:
        if not f"{name}.".startswith(tuple(f"{kept}." for kept in TAKEN_APART)):
            sys.modules.pop(name, None)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(shared))
    _libc.fflush(None)
    _libc.on_exit(_libc._exit, None)  # the first of what the C library calls at the end; it gets the exit status


def prepare_main(request: dict[str, Any]) -> types.CodeType:
    """An empty `__main__`, and the code that runs in it."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __annotations__={})
    kind, what = request["kind"], request["what"]
    sys.argv = [what if kind == "script" else kind, *request["arguments"]]
    if kind == "-m":
        sys.path[0] = os.getcwd()
        return compile("import runpy; runpy._run_module_as_main(MODULE)".replace("MODULE", repr(what)), "-m", "exec")
    if kind == "-c":
        sys.path[0] = ""
        return compile(what, "<string>", "exec")
    what = os.path.abspath(what)
    sys.path[0] = os.path.dirname(os.path.realpath(what))
    main.__dict__.update(__file__=what, __loader__=SourceFileLoader("__main__", what), __cached__=None)
    return compile(Path(what).read_bytes(), what, "exec")


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    gc.disable()  # there is no garbage among modules
    for module in IMPORTED[sys.argv[2]]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that its memory stays shared
    gc.enable()
    place = place_of_run()
    atexit.register(spare, dict(sys.modules))  # here, to be called after what scripts register
    state: dict[str, Any] = {
        "variables": {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)},
        "prefixes": PREFIXES,
        "limits": LIMITS,
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES},
        "user": os.getuid(),
    }
    (directory / "server.json").write_text(json.dumps(state))
    request, descriptors = serve(directory)
    become(request, descriptors, state)
    ctypes.memmove(place, os.environ.get(RUN_VARIABLE, NO_RUN).encode(), len(NO_RUN))
    sys.executable = str(directory / "python")
    multiprocessing.set_executable(sys.executable)  # so that what is spawned starts as fast
    exec(prepare_main(request), sys.modules["__main__"].__dict__)
