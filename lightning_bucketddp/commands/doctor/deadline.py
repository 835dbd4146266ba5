"""Doing something that may never end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

T = TypeVar("T")


class NeverEnded(Exception):
    """Something has not ended in time. Its thread may hang for ever: the process must not wait for it."""


def within(seconds: float, do: Callable[[], T], *, what: str) -> T:
    """What `do` returns or raises, or `NeverEnded`."""
    outcome: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            outcome.set_result(do())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="bucketddp-doctor").start()
    if not futures.wait([outcome], timeout=seconds).done:
        raise NeverEnded(f"{what} did not end within {seconds:g} s")
    return outcome.result()
