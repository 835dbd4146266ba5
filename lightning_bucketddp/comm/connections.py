"""The network below process groups: the interface of gloo, the sockets of NCCL, and TCP connections of this process.

Note: cutting the lines
    A rank that waits in a collective of gloo for another that has left waits until the time-out, or until the
    connection ends. One end of each connection between two ranks was accepted by a port on which that rank listens. So
    when each rank shuts down the connections that its own ports have accepted, except the store's, every connection is
    cut. If the other end is on a lost host, this end is shut down, whichever it is.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import struct
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_bucketddp.processes import boot_id, variables_by_default

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

SETTINGS = {"NCCL_NSOCKS_PERTHREAD": "4", "NCCL_SOCKET_NTHREADS": "2"}
# By their PCI vendor: the networks of AWS and of Google's cloud, for which NCCL has numbers of its own.
_VENDORS_KNOWN_TO_NCCL = {"0x1d0f", "0x1ae0"}
_KEY = "bucketddp/sockets"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_ANY_PORT = 9
# Of the file system that has the networks and NCCL's settings.
_ROOT = Path("/")
# Names may get lost during a run.
_resolve = functools.cache(socket.gethostbyname)


@contextmanager
def more_sockets(store: Store, *, rank: int, world_size: int, root: Path = _ROOT) -> Iterator[int]:
    """Set NCCL's variables in the block, on all ranks of `store` or on none; yield the number of hosts, or 0.

    NCCL reads them when it makes its first connection between hosts, and never again in that process: if the number is
    not 0, a collective must connect the group in the block. Processes that ranks start later do not inherit them.
    """
    settings = nccl_settings(os.environ, root=root)
    store.set(f"{_KEY}/{rank}", json.dumps([host_of(settings, root=root), uses_sockets_untuned(settings, root)]))
    answers = [json.loads(answer) for answer in store.multi_get([f"{_KEY}/{r}" for r in range(world_size)])]
    num_hosts = len({host for host, _ in answers})
    is_wanted = num_hosts > 1 and all(is_untuned for _, is_untuned in answers)
    with variables_by_default(SETTINGS if is_wanted else {}):
        yield num_hosts if is_wanted else 0


def uses_sockets_untuned(settings: Mapping[str, str], root: Path = _ROOT) -> bool:
    """Return whether NCCL sends to other hosts through sockets, and neither the user nor NCCL chooses their number."""
    network, plugin = (settings.get(name, "").lower() for name in ("NCCL_NET", "NCCL_NET_PLUGIN"))
    if any(name in settings for name in SETTINGS) or plugin not in ("", "none") or network not in ("", "socket"):
        return False
    may_use_infiniband = network == "" and settings.get("NCCL_IB_DISABLE", "") in ("", "0")
    if may_use_infiniband and any(root.glob("sys/class/infiniband/*")):
        return False
    vendors = {path.read_text().strip() for path in root.glob("sys/class/net/*/device/vendor")}
    return not vendors & _VENDORS_KNOWN_TO_NCCL


def nccl_settings(environment: Mapping[str, str], *, root: Path = _ROOT) -> dict[str, str]:
    """Return what NCCL will find set: in `environment`, else in the user's file, else in the machine's file."""
    import pwd  # not on every platform

    files = [Path("/etc/nccl.conf")]
    if named := environment.get("NCCL_CONF_FILE"):
        files.append(Path(named).absolute())
    else:
        with suppress(KeyError):  # a user without a name, as in some containers
            files.append(Path(pwd.getpwuid(os.getuid()).pw_dir) / ".nccl.conf")  # not `HOME`
    found: dict[str, str] = {}
    for file in files:
        with suppress(OSError):
            lines = (root / file.relative_to("/")).read_text(errors="replace").splitlines()
            # A line that begins with "#" is a comment to NCCL; here it sets a name that is never read.
            pairs = [line.split("=", 1) for line in lines if "=" in line]
            found |= {name.strip(): value.strip() for name, value in pairs}
    return found | {name: value for name, value in environment.items() if name.startswith("NCCL_")}


def host_of(settings: Mapping[str, str], *, root: Path = _ROOT) -> str:
    """Return a name that is equal for ranks on one host, by NCCL's rules."""
    return settings.get("NCCL_HOSTID") or f"{socket.gethostname()} {boot_id(root=root)}"


@contextmanager
def gloo_interface(*, on_one_host: bool) -> Iterator[None]:
    """Choose where gloo listens in groups that are made in the block, if the user has set no interface.

    On one host that is a loopback address: gloo itself would take that of the host's name. Between hosts it is the
    interface that leads to `MASTER_ADDR`.
    """
    if _INTERFACE in os.environ:
        interface = None
    elif on_one_host:
        interface = _interface_with("127.0.0.1")
    else:
        interface = interface_towards(os.environ.get("MASTER_ADDR", ""))
    with variables_by_default({} if interface is None else {_INTERFACE: interface}):
        yield


def interface_towards(address: str) -> str | None:
    """Return the interface through which packets leave for `address`; None if it is this host, or not known."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((_resolve(address), _ANY_PORT))  # sends nothing
        own_address = s.getsockname()[0]
        return None if own_address.startswith("127.") else _interface_with(own_address)
    return None


def _interface_with(address: str) -> str | None:
    with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        import fcntl  # not on every platform

        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


# A host that has acknowledged nothing for so long is lost.
SILENT_AFTER_S = 15.0
# Few enough to cost nothing, and enough that a network which loses one packet in ten loses not all of them.
_PROBE_AFTER_S, _PROBE_EVERY_S = 4, 1
# The kernel itself shall not end connections, some of which are the user's.
_MOST_PROBES = 127
_CHECK_EVERY_S = 1.0
_DESCRIPTORS = "/proc/self/fd"
# Of `struct tcp_info`: its state in the first byte, and the milliseconds since the last acknowledgement.
_STATE_AND_LAST_ACK = struct.Struct("B55xI")
_ESTABLISHED = 1


class Connections:
    """The connections of this process to other hosts, and which of these no longer answer.

    The kernel of a lost host acknowledges nothing any more, while that of a stopped process still does. This host's
    kernel reports how long ago the last acknowledgement came, also for idle connections if they send keep-alive probes,
    which `check` turns on. `store_port` is the port of the process group's store; None if it is not on a network.
    """

    def __init__(self, store_port: int | None = None) -> None:
        ends = [(s.getsockname(), s.getpeername()) for s in _connections_to_other_hosts()]
        self.addresses = sorted({_address(own) for own, _ in ends})  # of this host
        # The address of the host of the store; None if it is this one.
        self.store_host = next((_address(peer) for _, peer in ends if peer[1] == store_port), None)
        self.silent_hosts: frozenset[str] = frozenset()  # those that no longer answer, as of the last `check`
        self._store_port = store_port
        self._suspects: set[str] = set()
        self._kept_alive_since: dict[int, float] = {}
        self._checked_at = -_CHECK_EVERY_S

    def check(self, *, every_s: float = _CHECK_EVERY_S) -> None:
        """Find hosts that no longer answer, unless that was done a moment ago."""
        now = time.monotonic()
        if now - self._checked_at < every_s:
            return
        self._checked_at = now
        since: dict[int, float] = {}
        silent: set[str] = set()
        for s in _connections_to_other_hosts():
            with suppress(OSError):
                inode = os.fstat(s.fileno()).st_ino
                if inode not in self._kept_alive_since:
                    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MOST_PROBES)
                    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
                    # Last: the first probe is sent now, if it is time.
                    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
                since[inode] = self._kept_alive_since.get(inode, now)
                info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _STATE_AND_LAST_ACK.size)
                state, last_ack_ms = _STATE_AND_LAST_ACK.unpack(info)
                is_silent = min(now - since[inode], last_ack_ms / 1000) > SILENT_AFTER_S
                if state == _ESTABLISHED and is_silent:
                    silent.add(_address(s.getpeername()))
        self._kept_alive_since = since
        # Only the second time: this host itself may have been paused, with its probes on their way.
        self.silent_hosts = frozenset(silent & self._suspects)
        self._suspects = silent

    def cut_to(self, hosts: Collection[str | None]) -> None:
        """Shut down the connections to `hosts`, but the store's, and all to hosts that no longer answer."""
        for s in _connections_to_other_hosts() if hosts or self.silent_hosts else ():
            with suppress(OSError):
                own, peer = s.getsockname(), s.getpeername()
                is_kept = self._store_port in (own[1], peer[1]) or _address(peer) not in hosts
                if not is_kept or _address(peer) in self.silent_hosts:
                    s.shutdown(socket.SHUT_RDWR)


def cut_connections(*, except_port: int | None) -> None:
    """Shut down the connections that this process has accepted, but at `except_port` (Note: cutting the lines)."""
    listening = (s for s in _tcp_sockets() if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    ports = {s.getsockname()[1] for s in listening} - {except_port}
    for s in _tcp_sockets():
        if s.getsockname()[1] in ports:
            _shut_down(s)


def connection_ids() -> set[int]:
    """Return the ids of the TCP sockets of this process."""
    return {os.fstat(s.fileno()).st_ino for s in _tcp_sockets()}


def cut_all_connections(*, but: Collection[int]) -> None:
    """Shut down the connections of this process, except for those that have their id in `but`."""
    for s in _tcp_sockets():
        if os.fstat(s.fileno()).st_ino not in but:
            _shut_down(s)


def _shut_down(s: socket.socket) -> None:
    with suppress(OSError):  # it is not connected, and may listen; or the other end is gone
        s.getpeername()
        s.shutdown(socket.SHUT_RDWR)


def _connections_to_other_hosts() -> Iterator[socket.socket]:
    """Yield each TCP connection of this process that leaves its host; see `_tcp_sockets`."""
    for s in _tcp_sockets():
        with suppress(OSError):  # it is not connected
            if _address(s.getpeername()) != _address(s.getsockname()):
                yield s


def _address(end: tuple[str | int, ...]) -> str:
    """Return the address of one end of a connection; dual-stack sockets have a long form of IPv4 addresses."""
    return str(end[0]).removeprefix("::ffff:")


def _tcp_sockets() -> Iterator[socket.socket]:
    """Yield each TCP socket of this process under a new descriptor, which is closed before the next one."""
    for name in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as s:
                    if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                        yield s
