"""Processes that are made in a moment: forked from a server that has imported torch and Lightning once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

PROCESSES = multiprocessing.get_context("forkserver")
# There is one server for all, and it is asked once.
PROCESSES.set_forkserver_preload(["tests.support.preloaded"])


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
