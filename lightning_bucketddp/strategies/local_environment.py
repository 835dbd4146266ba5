"""The environment of processes that Lightning launches itself, less its Lightning base class."""

from __future__ import annotations

import errno
import os
import socket
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

from lightning_bucketddp.core.meeting_point import StartError, explain_port_in_use

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment as _LightningEnvironment
else:
    _LightningEnvironment = object

LAUNCHER_PID = "BUCKETDDP_LAUNCHER_PID"
# The value of `MASTER_PORT` that nobody has chosen: Lightning leaves it in the environment of whoever launches.
_FREE_PORT = "BUCKETDDP_FREE_PORT"


class HoldsPort(_LightningEnvironment):
    """Opens the port before the processes are launched that will look for it there, and keeps it for rank 0.

    Lightning closes a port that it has found to be free until rank 0 opens it again, and meanwhile anybody may take it.
    """

    _listener: socket.socket | None = None

    @property
    def main_port(self) -> int:
        # Read by a launcher, before it launches anything; later the variables that it has set say the same.
        if not self.creates_processes_externally:
            os.environ[LAUNCHER_PID] = str(os.getpid())
            if self.node_rank() == 0 and self._listener is None:
                self._listener = _open_port()
        return super().main_port

    def take_listener(self) -> socket.socket | None:
        """The socket that is open at the main port, if there is one. It is the caller's to close."""
        listener, self._listener = self._listener, None
        return listener

    def __getstate__(self) -> dict[str, Any]:
        # A process that is being spawned gets the socket; a copy or a file cannot.
        return self.__dict__ if get_spawning_popen() is not None else {**self.__dict__, "_listener": None}


def _open_port() -> socket.socket | None:
    """A socket at a free port, which `MASTER_PORT` then says. None if that was chosen; it must be free, too."""
    chosen = os.environ.get("MASTER_PORT")
    if chosen is not None and chosen != os.environ.get(_FREE_PORT):
        # Not kept: where the launcher is not rank 0 itself, nobody tells it when the port can be chosen again.
        _listen(int(chosen)).close()
        return None
    listener = _listen(0)
    os.environ["MASTER_PORT"] = os.environ[_FREE_PORT] = str(listener.getsockname()[1])
    return listener


def _listen(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=socket.SOMAXCONN)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise StartError(explain_port_in_use(port)) from error
