"""Single processes for tests that are limited or killed, forked from one that has imported torch: that is cheap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from tests.support.forks import PROCESSES


@contextmanager
def child(job: Callable[..., None], **kwargs: Any) -> Iterator[tuple[Any, Connection]]:
    """`job` in a process of its own, and the pipe on which it reports."""
    ours, theirs = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=job, args=(theirs,), kwargs=kwargs, daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def report_of(job: Callable[..., None], **kwargs: Any) -> Any:
    with child(job, **kwargs) as (_, pipe):
        return pipe.recv()
