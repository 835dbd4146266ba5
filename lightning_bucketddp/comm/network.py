"""Which network interface gloo uses, and over how many sockets NCCL sends from host to host."""

from __future__ import annotations

import functools
import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
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
# Of the file system that tells about networks and NCCL's settings.
_ROOT = Path("/")
# Names may get lost during a run.
_resolve = functools.cache(socket.gethostbyname)


@contextmanager
def more_sockets(store: Store, *, rank: int, world_size: int, root: Path = _ROOT) -> Iterator[int]:
    """Set NCCL's variables in the block, on all ranks of `store` or on none; yield on how many hosts.

    NCCL reads them when it makes its first connection between hosts, and never again in that process: if there are any
    hosts, a collective must connect the group in the block. What the ranks start later does not inherit them.
    """
    settings = nccl_settings(os.environ, root=root)
    store.set(f"{_KEY}/{rank}", json.dumps([host_of(settings, root=root), uses_sockets_untuned(settings, root)]))
    if rank == 0:
        answers = [json.loads(answer) for answer in store.multi_get([f"{_KEY}/{r}" for r in range(world_size)])]
        hosts = {host for host, _ in answers}
        is_wanted = len(hosts) > 1 and all(is_untuned for _, is_untuned in answers)
        store.set(_KEY, json.dumps(len(hosts) if is_wanted else 0))
    num_hosts = int(json.loads(store.get(_KEY)))
    with variables_by_default(SETTINGS if num_hosts > 0 else {}):
        yield num_hosts


def uses_sockets_untuned(settings: Mapping[str, str], root: Path = _ROOT) -> bool:
    """Return whether NCCL sends to other hosts through sockets, and neither the user nor NCCL has said how many."""
    network, plugin = (settings.get(name, "").lower() for name in ("NCCL_NET", "NCCL_NET_PLUGIN"))
    if any(name in settings for name in SETTINGS) or plugin not in ("", "none") or network not in ("", "socket"):
        return False
    may_use_infiniband = network == "" and settings.get("NCCL_IB_DISABLE", "") in ("", "0")
    if may_use_infiniband and _entries(root / "sys/class/infiniband"):
        return False
    for interface in _entries(root / "sys/class/net"):
        with suppress(OSError):  # one that is not hardware
            if (interface / "device" / "vendor").read_text().strip() in _VENDORS_KNOWN_TO_NCCL:
                return False
    return True


def nccl_settings(environment: Mapping[str, str], *, root: Path = _ROOT) -> dict[str, str]:
    """Return what NCCL will find set: in `environment`, else in the user's file, else in the machine's file."""
    import pwd  # not on every platform

    files = [Path("/etc/nccl.conf")]
    if named := environment.get("NCCL_CONF_FILE"):
        files.append(Path(named).absolute())
    else:
        with suppress(KeyError):  # a user without a name, as in some containers
            files.append(Path(pwd.getpwuid(os.getuid()).pw_dir) / ".nccl.conf")  # whatever `HOME` says
    found: dict[str, str] = {}
    for file in files:
        with suppress(OSError):
            lines = (root / file.relative_to("/")).read_text(errors="replace").splitlines()
            # A name that begins with "#" is a comment to NCCL, and to us one that nobody asks for.
            pairs = [line.split("=", 1) for line in lines if "=" in line]
            found |= {name.strip(): value.strip() for name, value in pairs}
    return found | {name: value for name, value in environment.items() if name.startswith("NCCL_")}


def host_of(settings: Mapping[str, str], *, root: Path = _ROOT) -> str:
    """Return a name that is equal for ranks on one host, as NCCL sees it."""
    return settings.get("NCCL_HOSTID") or f"{socket.gethostname()} {boot_id(root=root)}"


def _entries(directory: Path) -> list[Path]:
    with suppress(OSError):
        return list(directory.iterdir())
    return []


@contextmanager
def gloo_interface(*, on_one_host: bool) -> Iterator[None]:
    """Choose where gloo listens in groups that are made in the block, if the user has set no interface.

    On one host that is a loopback address: gloo itself would take that of the host's name. Between hosts it is the
    interface that leads to `MASTER_ADDR`.
    """
    main_address = os.environ.get("MASTER_ADDR")
    interface = None
    if on_one_host:
        interface = _interface_with("127.0.0.1")
    elif main_address and _INTERFACE not in os.environ:
        interface = interface_towards(main_address)
    with variables_by_default({} if interface is None else {_INTERFACE: interface}):
        yield


def interface_towards(address: str) -> str | None:
    """Return the interface through which packets leave for `address`; None if it is this host, or not known."""
    with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
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
