"""The network interface that gloo uses between hosts."""

from __future__ import annotations

import functools
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_ANY_PORT = 9


@contextmanager
def gloo_between_hosts() -> Iterator[None]:
    """Have gloo, in groups made in the block, take the interface that leads to `MASTER_ADDR`, if none is set."""
    main_address = os.environ.get("MASTER_ADDR")
    interface = interface_towards(main_address) if main_address and _VARIABLE not in os.environ else None
    if interface is None:
        yield
        return
    os.environ[_VARIABLE] = interface
    try:
        yield
    finally:
        del os.environ[_VARIABLE]


def keep_gloo_on_this_host() -> None:
    """Have gloo listen at a loopback address from now on, if no interface is set: it would at that of the host's name.

    The variable stays, as all groups that the ranks make later are for them alone.
    """
    if _VARIABLE not in os.environ and (interface := _interface_with("127.0.0.1")) is not None:
        os.environ[_VARIABLE] = interface


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
