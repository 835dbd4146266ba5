"""What `warm.py` writes as `python`: asks the server beside it for a process, and ends as that one does."""

from __future__ import annotations

import array
import json
import os
import resource
import signal
import socket
import sys

TYPE_CHECKING = False  # `typing` takes longer to import than all of the above
if TYPE_CHECKING:
    from typing import Any

REAL_PYTHON = sys.executable
OURS = os.path.abspath(sys.argv[0])
# Signals that a process can get from others, or from a terminal.
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
NAMESPACES = ("user", "net", "mnt", "uts", "ipc")


def main(arguments: list[str]) -> None:
    with open(os.path.join(os.path.dirname(OURS), "server.json")) as file:
        server = json.load(file)
    how = how_to_run(arguments)
    if how is None or differs(server):
        os.execv(REAL_PYTHON, [REAL_PYTHON, *arguments])
    connection = socket.socket(socket.AF_UNIX)
    numbers = sorted(int(number) for number in os.listdir("/proc/self/fd"))
    numbers = [number for number in numbers if number != connection.fileno() and is_open(number)]
    namespaces = [name for name in NAMESPACES if os.readlink(f"/proc/self/ns/{name}") != server["namespaces"][name]]
    request = {
        **how,
        "client": os.getpid(),
        "directory": os.getcwd(),
        "environment": dict(os.environ),
        "umask": current_umask(),
        "limits": [resource.getrlimit(which) for which in server["limits"]],
        "ignored": [s for s in signal.valid_signals() if signal.getsignal(s) is signal.SIG_IGN],
        "descriptors": numbers,
        "namespaces": namespaces,
    }
    sent = [*numbers, *(os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in namespaces)]
    connection.connect(os.path.join(os.path.dirname(OURS), "socket"))
    early: list[int] = []
    for handed_on in HANDED_ON:
        if signal.getsignal(handed_on) is not signal.SIG_IGN:
            signal.signal(handed_on, lambda number, _: early.append(number))
    content = json.dumps(request).encode()
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", sent))]
    connection.sendmsg([len(content).to_bytes(8, "little")], ancillary)
    connection.sendall(content)
    answers = connection.makefile()
    pid = int(answers.readline())
    for handed_on in HANDED_ON:
        if signal.getsignal(handed_on) is not signal.SIG_IGN:
            signal.signal(handed_on, lambda number, _: os.kill(pid, number))
    for number in early:
        os.kill(pid, number)
    # What others wait to see closed must be closed by the script alone.
    null = os.open(os.devnull, os.O_RDWR)
    for number in sent:
        os.dup2(null, number)
    end(int(answers.readline()))


def how_to_run(arguments: list[str]) -> dict[str, Any] | None:
    """What the first arguments of Python say; None for what is left to the ordinary interpreter."""
    options: dict[str, Any] = {"is_unbuffered": False, "ignores_warnings": False}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "-u":
            options["is_unbuffered"] = True
        elif argument == "-W" and rest[:1] == ["ignore"]:
            options["ignores_warnings"] = bool(rest.pop(0))
        elif argument == "-B" and os.environ.get("PYTHONDONTWRITEBYTECODE"):
            continue
        elif argument in ("-m", "-c") and rest:
            return {"kind": argument, "what": rest[0], "arguments": rest[1:], **options}
        elif argument.startswith("-") or not os.path.isfile(argument):
            return None
        else:
            return {"kind": "script", "what": argument, "arguments": rest, **options}
    return None


def differs(server: dict[str, Any]) -> bool:
    """Whether a fresh interpreter would not be as the server is."""
    names = set(server["variables"])
    names.update(name for name in os.environ if name.startswith(tuple(server["prefixes"])))
    # That one is read again.
    if any(os.environ.get(name) != server["variables"].get(name) for name in names - {"PYTHONPATH"}):
        return True
    return os.readlink("/proc/self/ns/pid") != server["namespaces"]["pid"] or os.getuid() != server["user"]


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def end(status: int) -> None:
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
