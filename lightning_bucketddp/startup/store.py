"""The store of the rendezvous, at rank 0's address or with torchrun's agent, and the processes that a rank launches."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lightning_bucketddp.comm.process_group import ASKS_EVERY_S_PER_RANK
from lightning_bucketddp.faults.failure import signal_name
from lightning_bucketddp.processes import agent_holds_store, is_launched_by_torchrun, is_running

log = logging.getLogger(__name__)

LAUNCHER_PID = "BUCKETDDP_LAUNCHER_PID"
POLL_S = 0.05
# Ranks that are started together come together: a rank that has not waited long asks again soon.
_POLL_PER_S_WAITED = 0.1
# A start that takes long is reported after the first time, and each time the second has passed.
_REPORTS_S = (30, 60)
# How long torch may try to reach a store that was there a moment ago. All ranks try at once, and try again.
_CLIENT_TIMEOUT_S = 1.0
_CLIENT_TIMEOUT_PER_RANK_S = 0.1
_LONGEST_CLIENT_TIMEOUT_S = 30.0
# How long a process may need to end by itself, once it knows why.
_GRACE_S = 3.0


class StartError(RuntimeError):
    """The ranks could not start together."""

    says_all = True  # frames of this package would not help


class Deadline:
    """How long a rank waits for others: when to check again, when to report, and when to give up."""

    def __init__(self, timeout_s: float, *, world_size: int) -> None:
        self.timeout_s = timeout_s
        self._shortest_poll_s = ASKS_EVERY_S_PER_RANK * world_size
        self.failure: str | None = None  # why it is useless to wait on, once that is known
        self._began = time.monotonic()
        self._num_reports = 0

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        return self.waited_s > self.timeout_s

    def pause(self) -> None:
        """Sleep until it is time to check again."""
        time.sleep(max(self._shortest_poll_s, min(_POLL_PER_S_WAITED * self.waited_s, POLL_S)))

    def report(self, awaited: Callable[[], str]) -> None:
        """Log which ranks are waited for, if it is time to."""
        first_s, every_s = _REPORTS_S
        if self.waited_s >= (self._num_reports * every_s or first_s):
            self._num_reports += 1
            log.warning(
                f"bucketddp: have waited {self.waited_s:.0f} s for {awaited()}; giving up after {self.timeout_s:g} s."
            )


@dataclass(frozen=True, kw_only=True)
class StoreAddress:
    """Where the store of a run is, for one of its ranks; if it `is_local`, no other host shall reach it."""

    address: str
    port: int
    rank: int
    world_size: int
    local_rank: int
    is_local: bool = False
    num_fits: int = 0  # and evaluations, that the program of this rank has had before
    takes_over: bool = False  # the store, from rank 0, which is gone

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def is_host(self) -> bool:
        """Return whether this rank holds the store; otherwise torchrun's agent or another rank does."""
        return (self.rank == 0 or self.takes_over) and not agent_holds_store()

    def open_server(self, listener: socket.socket | None, *, deadline: Deadline) -> Store:
        """Open the store, at a socket that listens already if there is one. Keep the result until we are connected."""
        if listener is None and self.is_local:
            listener = listen(self.port, address=self.address)
        # Before 2.8 only the older implementation of the store takes over a socket.
        can_use_libuv = listener is None or torch.__version__ >= "2.8"
        try:
            return TCPStore(
                self.address if self.is_local else "localhost",
                self.port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,  # so that our own client shares this server, and keeps it
                master_listen_fd=None if listener is None else listener.detach(),
                use_libuv=can_use_libuv and os.environ.get("USE_LIBUV", "1") == "1",
                timeout=timedelta(seconds=max(deadline.timeout_s - deadline.waited_s, 1.0)),
            )
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise StartError(explain_port_in_use(self.port)) from error

    def connect(self, *, deadline: Deadline) -> Store:
        """Connect to the store as soon as it is there."""
        # As bytes: for a text Python imports a codec, which takes longer than the whole rendezvous.
        host: Any = self.address.encode() if self.address.isascii() else self.address
        client_timeout_s = _CLIENT_TIMEOUT_S + _CLIENT_TIMEOUT_PER_RANK_S * self.world_size
        while True:
            try:
                # Asked without torch first, which prints a stack trace for each attempt that fails.
                with socket.create_connection((host, self.port), timeout=1) as connection:
                    reached = str(connection.getpeername()[0])
                return TCPStore(
                    reached,  # a number: its name is resolved once
                    self.port,
                    is_master=self.is_host,
                    multi_tenant=self.is_host,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=min(client_timeout_s, _LONGEST_CLIENT_TIMEOUT_S)),
                )
            except OSError as error:
                obstacle = error.strerror or str(error)
            except RuntimeError as error:
                log.debug("no store at %s: %s", self, error)
                obstacle = "what listens there is not rank 0, maybe another program"
            if deadline.failure is not None or deadline.is_over:
                raise StartError(deadline.failure or self.explain_unreachable(obstacle, deadline.timeout_s))
            if self.local_rank == 0:
                deadline.report(lambda: f"rank 0 at {self}, which rank {self.rank} cannot reach ({obstacle}),")  # noqa: B023
            deadline.pause()

    def explain_unreachable(self, obstacle: str, timeout_s: float) -> str:
        remedy = "Check that rank 0 runs there, `MASTER_ADDR`, `MASTER_PORT`, and firewalls."
        if self.rank == 0:
            remedy = "`MASTER_ADDR` must be an address of this host."
        return (
            f"Rank {self.rank} on host {socket.gethostname()} could not reach rank 0 at {self} within {timeout_s:g} s:"
            f" {obstacle}. {remedy}"
        )


def is_on_this_host(address: str, *, num_nodes: int) -> bool:
    """Return whether all ranks of a run are on this host and meet at `address`, which no other host can reach."""
    # By the text of the address: the name of a host often resolves to a loopback address on that host alone. With
    # several nodes, the first may call itself so.
    try:
        is_loopback = address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        is_loopback = False
    return is_loopback and num_nodes == 1


def listen(port: int, *, address: str | None) -> socket.socket:
    """Return a socket that listens at `port` of `address`; None: of every address of this host."""
    both = address is None and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in (address or "") else socket.AF_INET
    try:
        return socket.create_server((address or "", port), family=family, dualstack_ipv6=both, backlog=socket.SOMAXCONN)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise StartError(explain_port_in_use(port)) from error


def explain_port_in_use(port: int) -> str:
    return (
        f"Rank 0 cannot listen on port {port}: another program is using it. Set `MASTER_PORT` to a free port, the same"
        " for all ranks; for a run on this host alone leave it unset, and a free one is found."
    )


def part_of(store: Store, name: str) -> Store:
    """Return `store`, with `name` before all keys."""
    return PrefixStore(name, store)


class ChildProcesses:
    """The processes that a launcher of the strategy has started; none if another program launches."""

    def __init__(self, launcher: Any, *, rank: int, local_rank: int) -> None:
        self._launcher = launcher
        self._rank = rank
        self._launcher_pid = int(os.environ.get(LAUNCHER_PID, 0)) if local_rank > 0 else 0
        if is_launched_by_torchrun():
            self._launcher_pid = os.getppid()  # torchrun's agent, which holds the store

    def find_failure(self, *, of_children: bool = True) -> str | None:
        """Return in words which process has ended that the start needs; None if none has."""
        children = getattr(self._launcher, "children", ()) if of_children else ()
        for rank, process in enumerate(children, start=self._rank + 1):
            if process.poll() is not None:
                return describe_end(rank, process, when=" before all ranks had joined")
        if self._launcher_pid and not is_running(self._launcher_pid):
            return (
                f"Rank {self._rank} has lost the process that launched it ({self._launcher_pid}): that one has ended."
            )
        return None

    @contextmanager
    def ended_on_failure(self) -> Iterator[None]:
        """End all of these processes if the block raises."""
        try:
            yield
        except BaseException:
            until = time.monotonic() + _GRACE_S
            for process in getattr(self._launcher, "children", ()):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(until - time.monotonic(), 0))
                process.kill()  # does nothing if it has ended
                process.wait()
            raise


def describe_end(rank: int, process: subprocess.Popen[bytes], *, when: str = "") -> str:
    status = process.returncode
    how = f"with exit status {status}" if status >= 0 else f"by {signal_name(-status)}"
    is_killed = status == -signal.SIGKILL  # without a word
    why = "The kernel does that when memory runs out: see `dmesg`." if is_killed else "Its output says why."
    return f"Rank {rank} (process {process.pid}) ended {how}{when}. {why}"
