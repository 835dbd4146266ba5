"""The network interface that gloo uses."""

from __future__ import annotations

import functools
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lightning_bucketddp.processes import variables_by_default

_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_ANY_PORT = 9


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
    elif main_address and _VARIABLE not in os.environ:
        interface = interface_towards(main_address)
    with variables_by_default({} if interface is None else {_VARIABLE: interface}):
        yield


def interface_towards(address: str) -> str | None:
    """Return the interface through which packets leave for `address`; None if it is this host, or not known."""
    with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((_number_of(address), _ANY_PORT))  # sends nothing
        own_address = s.getsockname()[0]
        return None if own_address.startswith("127.") else _interface_with(own_address)
    return None


def _interface_with(address: str) -> str | None:
    with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        return next((name for _, name in socket.if_nameindex() if _address_of(name, s) == address), None)
    return None


@functools.cache
def _number_of(address: str) -> str:
    """Return the number that `address` stands for, as it was the first time: names may get lost during a run."""
    return socket.gethostbyname(address)


def _address_of(interface: str, s: socket.socket) -> str | None:
    import fcntl  # not on every platform

    with suppress(OSError):  # it has none
        answer = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(answer[20:24])
    return None
