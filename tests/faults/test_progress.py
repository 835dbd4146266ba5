"""The phase of a rank; and that reading the frames of a thread disturbs nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.futures import Future

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.faults.failure import Failure, show_error
from lightning_bucketddp.faults.progress import OPTIMIZER, SAVING, Progress
from lightning_bucketddp.reducer.reduction import PendingReduction
from tests.support.programs import REPOSITORY


def test_an_error_that_was_raised_from_itself_ends_no_search() -> None:
    error = ValueError("by chance")
    error.__cause__ = error
    progress = Progress(waiting_in=())
    assert not progress.was_waiting(error)
    assert progress.describe_origin(error) == "set-up"
    shown: list[Any] = []
    show_error(lambda *it: shown.append(it), error)
    assert shown == [(ValueError, error, None)]


class Mute(RuntimeError):
    def __str__(self) -> str:
        raise IndexError


def test_an_error_that_has_no_text_is_reported_all_the_same() -> None:
    assert not Progress(waiting_in=()).was_waiting(Mute())
    failure = Failure.of(Mute(), rank=1, where="forward")
    assert failure.summary().endswith("failed in forward: Mute: <its text raises IndexError>")


def test_asking_for_frames_locks_no_thread_for_ever() -> None:
    # Garbage collection under a lock of the interpreter's stopped all threads of a rank, once in some thousand runs.
    subprocess.run(
        [sys.executable, "-m", "tests.support.scripts.looking_at_frames"], cwd=REPOSITORY, check=True, timeout=60
    )


@contextmanager
def looked_at(then: Callable[[], object]) -> Iterator[Progress]:
    """Check from another thread that this rank waits in the block; call `then` to end that."""
    progress = BucketDDPStrategy()._progress
    progress.follow_this_thread()
    progress.since -= 10
    with ThreadPoolExecutor(1) as threads:

        def check() -> bool:
            time.sleep(0.3)
            is_waiting = progress.is_waiting
            then()
            return is_waiting

        checked = threads.submit(check)
        yield progress
    assert checked.result()


def test_a_rank_that_waits_for_a_bucket_is_seen_to_wait() -> None:
    lock = threading.Lock()
    lock.acquire()
    with looked_at(then=lock.release) as progress:
        # As torch's own: neither `wait` has a frame in Python.
        PendingReduction(0, SimpleNamespace(wait=lock.acquire)).wait()
    with pytest.raises(RuntimeError) as raised:
        PendingReduction(0, SimpleNamespace(wait=partial(torch.ones(3).view, 7))).wait()
    assert progress.was_waiting(raised.value)


def test_a_rank_that_waits_for_a_communication_hook_is_seen_to_wait() -> None:
    future: Future[Any] = Future()
    error = RuntimeError("Application timeout caused pair closure")
    with looked_at(then=partial(future.set_exception, error)) as progress, pytest.raises(RuntimeError) as raised:
        future.wait()
    assert progress.was_waiting(raised.value)


def test_a_phase_that_raises_is_left_and_named_where_the_error_is_reported() -> None:
    progress = Progress(waiting_in=())
    progress.enter("the training loop")
    with pytest.raises(ValueError, match="outer") as raised:  # noqa: PT012  (as a user's program does)
        try:
            with progress.during(SAVING), progress.during(OPTIMIZER):
                raise KeyError
        except KeyError as error:
            assert (progress.phase, progress.may_be_interrupted) == ("the training loop", True)
            raise ValueError("outer") from error
    assert progress.describe_origin(raised.value) == "optimizer"
    assert progress.describe_origin(ValueError("another")) == "the training loop"
