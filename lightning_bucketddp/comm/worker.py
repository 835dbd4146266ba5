"""A thread that does one thing after the other, for what must go on while the training thread computes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class WorkerThread(threading.Thread):
    """The thread of a `Worker`: what it exchanges with other ranks follows from what was started elsewhere."""


class Worker:
    """Calls functions in a thread of its own, in the order in which they were given to it.

    With `stops_at_error`, all functions after one that has failed fail by the same error: what they exchange with other
    ranks would meet what these have not got to. A thread that waits for a rank that is gone ends with the process.
    """

    def __init__(self, name: str, *, stops_at_error: bool = True) -> None:
        self._given: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        # Not a method, which would keep this object: garbage collection ends a worker that nobody has closed.
        self._thread = WorkerThread(target=_work, args=(self._given, stops_at_error), name=name, daemon=True)
        self._thread.start()
        self._last: Future[Any] | None = None
        self._end = weakref.finalize(self, self._given.put, None)

    def submit(self, function: Callable[[], _Result]) -> Future[_Result]:
        """Have `function` called when all before it have been."""
        self._last = future = Future[_Result]()
        self._given.put((function, future))
        return future

    def close(self) -> None:
        """Take nothing more; end now if all is done, otherwise when it is."""
        self._end()
        if self._last is None or self._last.done():
            self._thread.join()


def _work(given: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None], stops_at_error: bool) -> None:
    failure: BaseException | None = None
    while (next_one := given.get()) is not None:
        function, future = next_one
        try:
            if failure is not None and stops_at_error:
                raise failure
            future.set_result(function())
        except Exception as error:
            failure = error
            future.set_exception(error)
        del next_one, function, future  # tensors hang on them
