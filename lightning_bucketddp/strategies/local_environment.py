"""The port and the variables of processes that Lightning launches itself."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_bucketddp.startup.launched import LAUNCHER_PID
from lightning_bucketddp.startup.meeting_point import StartError, explain_port_in_use


class HoldsPort:
    """The part of a launcher that opens the port before it launches processes that will look for it there.

    Lightning closes a port that it has found to be free until rank 0 opens it again, and meanwhile anybody may take it.
    """

    # Of the root of Lightning: what it uses where no scheduler chooses the port.
    lightning_environment: type
    _listener: socket.socket | None = None

    def take_listener(self) -> socket.socket | None:
        """Return the socket that is open at the main port, if there is one. It is the caller's to close."""
        listener, self._listener = self._listener, None
        return listener

    def _open_port(self, environment: Any) -> None:
        """Keep a free port open for rank 0. One that the user has chosen is only tried."""
        is_ours_to_choose = type(environment) is self.lightning_environment
        if not is_ours_to_choose or environment.creates_processes_externally or environment.node_rank() != 0:
            return
        if "MASTER_PORT" in os.environ:
            # Not kept: where the launcher is not rank 0 itself, nobody tells it when the port can be chosen again.
            _listen(environment.main_port).close()
            return
        self._listener = _listen(int(os.environ.get("STANDALONE_PORT", 0)))
        environment._main_port = self._listener.getsockname()[1]


@contextmanager
def launching(*restored: str) -> Iterator[None]:
    """Tell processes that are launched inside who launches them; then restore that and the variables `restored`."""
    before = {name: os.environ.get(name) for name in (LAUNCHER_PID, *restored)}
    os.environ[LAUNCHER_PID] = str(os.getpid())
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _listen(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=socket.SOMAXCONN)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise StartError(explain_port_in_use(port)) from error
