"""The hosts of the benchmarks, for tests, which are skipped where a machine does not permit them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

import pytest

from benchmarks import hosts
from benchmarks.hosts import PACKAGE_OF, Host, HostsRefused, Network

__all__ = ["PACKAGE_OF", "Host", "Network", "held", "hosts_on_a_switch", "two_hosts"]

T = TypeVar("T")


def two_hosts() -> AbstractContextManager[tuple[Host, Host]]:
    """Two hosts that reach each other, and nothing else."""
    return _or_skip(hosts.two_hosts())


def hosts_on_a_switch(num_hosts: int) -> AbstractContextManager[Network]:
    """Hosts that reach each other through a switch, on which cables can be pulled and disturbed."""
    return _or_skip(hosts.hosts_on_a_switch(num_hosts))


def held(*command: str) -> AbstractContextManager[int]:
    """The process that holds what `command` makes."""
    return _or_skip(hosts.held(*command))


@contextmanager
def _or_skip(wanted: AbstractContextManager[T]) -> Iterator[T]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(wanted)
        except HostsRefused as error:
            pytest.skip(str(error))
        yield made
