"""A `python` that starts in a moment: forked from a server that has imported torch and Lightning once.

    subprocess.Popen([warm.python(), "script.py", "argument"])
    subprocess.Popen([warm.python_without_lightning(), "script.py"])  # torch, and what Lightning needs, but not itself

To whoever starts it, and to the script, it is like the interpreter that runs the tests, whose neighbour it is; where a
fork could make a difference (options of Python, variables that an import reads, a namespace for processes), it becomes
the ordinary one. At its end torch is not taken apart: a test of how torch ends uses `sys.executable`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

# All processes of a run have it in their environment; a server whose children are to be found has room for it.
RUN_VARIABLE = "BUCKETDDP_TEST_RUN"
NO_RUN = "0" * 36

_CLIENT = Path(__file__).with_name("warm_client.py")
_COMMANDS = ("torchrun", "bucketddp")


class _Server:
    def __init__(self, imported: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="bucketddp-warm-"))
        client = f"#!{sys.executable} -IS\n{_CLIENT.read_text()}"
        self.python = self._write("python", client)
        for command in _COMMANDS:
            text = Path(sys.executable).with_name(command).read_text()
            self._write(command, f"#!{self.python}\n{text.partition(chr(10))[2]}")
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("warm_server.py"), self.directory, imported],
            stdin=subprocess.PIPE,  # it ends with its input, so with us at the latest
            stdout=subprocess.PIPE,
            env={**os.environ, RUN_VARIABLE: NO_RUN},
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def _write(self, name: str, text: str) -> str:
        path = self.directory / name
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.communicate()
        shutil.rmtree(self.directory)


_servers: dict[str, _Server] = {}
_lock = threading.Lock()


def python() -> str:
    """The path of the warm interpreter."""
    return _server("lightning").python


def python_without_lightning() -> str:
    """The path of one in which Lightning and we are yet to be imported."""
    return _server("torch").python


def _server(imported: str) -> _Server:
    with _lock:  # some tests start several programs at once
        if imported in _servers and not _servers[imported].is_running:  # a script has killed its parent
            _servers.pop(imported).close()
        if imported not in _servers:
            _servers[imported] = _Server(imported)
        return _servers[imported]


def pids() -> list[int]:
    """The servers' processes."""
    return [server.pid for server in _servers.values()]


def close() -> None:
    """End the servers; they are started again when they are needed."""
    while _servers:
        _servers.popitem()[1].close()
