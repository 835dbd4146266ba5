"""Two hosts on one machine: network namespaces, joined by a cable.

They live as long as the two processes that hold them, and need no more rights than a user namespace gives.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

PACKAGE_OF = dict.fromkeys(("unshare", "nsenter", "setpriv"), "util-linux") | {"ip": "iproute2", "tc": "iproute2"}
INTERFACE = "eth0"


class HostsRefused(Exception):
    """This machine does not let us have hosts."""


@dataclass(frozen=True)
class Host:
    """A network of its own; what `within` is put in front of runs in it."""

    address: str
    within: tuple[str, ...]

    def call(self, *command: str) -> str:
        """What `command` prints on this host. Not every machine permits it."""
        process = subprocess.run([*self.within, *command], capture_output=True, text=True, check=False)
        if process.returncode != 0:
            raise HostsRefused(f"this machine does not permit `{' '.join(command)}`: {process.stderr.strip()}")
        return process.stdout

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
    for tool in PACKAGE_OF:
        if shutil.which(tool) is None:
            raise HostsRefused(f"`{tool}` is not installed (package {PACKAGE_OF[tool]})")
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
