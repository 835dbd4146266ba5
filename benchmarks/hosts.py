"""Hosts on one machine: network namespaces, joined by a cable, or by a switch on which cables can be disturbed.

They live as long as the processes that hold them, and need no more rights than a user namespace gives.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

PACKAGE_OF = dict.fromkeys(("unshare", "nsenter", "setpriv"), "util-linux") | {"ip": "iproute2", "tc": "iproute2"}
INTERFACE = "eth0"


class HostsRefused(Exception):
    """This machine does not let us have hosts."""


@dataclass(frozen=True)
class Host:
    """A network of its own; what `within` is put in front of runs in it."""

    address: str
    within: tuple[str, ...]
    # Of its namespaces; 0: they are entered by `within` only.
    pid: int = 0

    def call(self, *command: str) -> str:
        """What `command` prints on this host. Not every machine permits it."""
        process = subprocess.run([*self.within, *command], capture_output=True, text=True, check=False)
        if process.returncode != 0:
            raise HostsRefused(f"this machine does not permit `{' '.join(command)}`: {process.stderr.strip()}")
        return process.stdout

    def enter(self) -> None:
        """Move this process, which has one thread, to this host, and name the host after its address."""
        libc = ctypes.CDLL(None, use_errno=True)
        for namespace in ("user", "net", "uts"):  # `os.setns` is there since Python 3.12
            descriptor = os.open(f"/proc/{self.pid}/ns/{namespace}", os.O_RDONLY)
            if libc.setns(descriptor, 0) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the {namespace} namespace of {self.address}")
            os.close(descriptor)
        socket.sethostname(f"host{self.address.rpartition('.')[2]}")

    @property
    def num_bytes_sent(self) -> int:
        """How much has left this host through the cable."""
        [link] = json.loads(self.call("ip", "-json", "-statistics", "link", "show", "dev", INTERFACE))
        return int(link["stats64"]["tx"]["bytes"])

    @property
    def limit(self) -> dict[str, Any]:
        """What the kernel tells about the limit on what leaves this host."""
        [limit] = json.loads(self.call("tc", "-json", "-statistics", "qdisc", "show", "dev", INTERFACE))
        return dict(limit)


@contextmanager
def two_hosts(*, rate: str | None = None) -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other, and nothing else, at no more than `rate`, until the end of the context."""
    _check_tools()
    with ExitStack() as holders:
        pid = holders.enter_context(held("unshare", "--user", "--map-root-user", "--net"))
        user = ("nsenter", "--target", str(pid), "--user", "--preserve-credentials")
        other_pid = holders.enter_context(held(*user, "unshare", "--net"))
        hosts = Host("10.0.0.1", (*user, "--net")), Host("10.0.0.2", (*user, f"--net=/proc/{other_pid}/ns/net"))
        cable = ("link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(other_pid))
        hosts[0].call("ip", *cable)
        for host in hosts:
            host.call("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
            for link in (INTERFACE, "lo"):
                host.call("ip", "link", "set", link, "up")
            if rate is not None:
                shape = ("rate", rate, "burst", "256kb", "latency", "50ms")
                host.call("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *shape)
        yield hosts


@dataclass(frozen=True)
class Network:
    """Hosts that reach each other through a switch."""

    hosts: Sequence[Host]
    switch: Host
    _orders: IO[bytes]

    def pull_cable(self, host: int) -> None:
        """Have `host` lose its connection to the switch: it sees no carrier, the others see nothing."""
        self.switch.call("ip", "link", "set", f"port{host}", "down")

    def plug_cable(self, host: int) -> None:
        """Undo `pull_cable`."""
        self.switch.call("ip", "link", "set", f"port{host}", "up")

    def disturb(
        self, *, loss: float = 0.0, delay_s: float = 0.0, source: int | None = None, target: int | None = None
    ) -> None:
        """Have the switch lose a share of the frames, and pass on the others late; all, or those from and to a host."""
        order = {"loss": loss, "delay_s": delay_s, "source": source, "target": target}
        self._orders.write(json.dumps(order).encode() + b"\n")


@contextmanager
def hosts_on_a_switch(num_hosts: int) -> Iterator[Network]:
    """Hosts 10.0.0.1, 10.0.0.2, ..., with names of their own for those who set them, until the end of the context."""
    _check_tools()
    with ExitStack() as holders:
        pid = holders.enter_context(held("unshare", "--user", "--map-root-user", "--net"))
        user = ("nsenter", "--target", str(pid), "--user", "--preserve-credentials")
        switch = Host("", (*user, "--net"), pid)
        hosts = []
        for number in range(num_hosts):
            own = holders.enter_context(held(*user, "unshare", "--net", "--uts"))
            namespaces = (f"--net=/proc/{own}/ns/net", f"--uts=/proc/{own}/ns/uts")
            host = Host(f"10.0.0.{number + 1}", (*user, *namespaces), own)
            port = f"port{number}"
            switch.call("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", str(own))
            switch.call("ip", "link", "set", port, "up")
            host.call("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
            for link in (INTERFACE, "lo"):
                host.call("ip", "link", "set", link, "up")
            hosts.append(host)
        program = [sys.executable, "-S", str(Path(__file__).with_name("switch.py")), str(num_hosts)]
        process = subprocess.Popen(
            [*switch.within, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        holders.enter_context(process)
        holders.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        if not process.stdout.readline():
            raise HostsRefused(f"this machine does not permit a switch: {process.stderr.read().decode().strip()}")
        yield Network(hosts, switch, process.stdin)


def _check_tools() -> None:
    for tool in PACKAGE_OF:
        if shutil.which(tool) is None:
            raise HostsRefused(f"`{tool}` is not installed (package {PACKAGE_OF[tool]})")


@contextmanager
def held(*command: str) -> Iterator[int]:
    """The process that holds what `command` makes. It ends with its input, so with us at the latest."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "cat"], stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        with suppress(BrokenPipeError):  # refused already
            holder.stdin.write(b"\n")
        # The echo tells that the namespaces are there.
        if not holder.stdout.readline():
            error = holder.stderr.read().decode().strip()
            raise HostsRefused(f"this machine does not permit `{' '.join(command)}`: {error}")
        yield holder.pid
