"""Signals that are noticed by a thread that is not the one to which they come."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_bucketddp.faults.signals import SignalWakeup


@pytest.fixture(autouse=True)
def _handled() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    yield
    signal.signal(signal.SIGUSR1, before)


@contextmanager
def installed() -> Iterator[SignalWakeup]:
    wakeup = SignalWakeup()
    wakeup.install()
    try:
        yield wakeup
    finally:
        wakeup.uninstall()


def current_descriptor() -> int:
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    return descriptor


def test_signals_are_told_once_to_everyone_who_listens() -> None:
    with installed() as one, installed() as other:
        assert one.received() == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert one.received() == [signal.SIGUSR1]
        assert one.received() == []
        assert other.received() == [signal.SIGUSR1]


def test_the_descriptor_is_given_back_and_hears_of_signals_meanwhile() -> None:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno())
    try:
        with installed() as wakeup:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert wakeup.received() == [signal.SIGUSR1]
            assert reader.recv(10) == bytes([signal.SIGUSR1])
        assert current_descriptor() == writer.fileno()
    finally:
        signal.set_wakeup_fd(before)
        reader.close()
        writer.close()


def test_signals_of_a_forked_child_are_not_those_of_its_parent() -> None:
    with installed() as wakeup:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0)
        os.waitpid(child, 0)
        assert signal.SIGUSR1 not in wakeup.received()  # the end of the child may be there: `DataLoader` listens for it
