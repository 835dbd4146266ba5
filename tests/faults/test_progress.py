"""Where a rank is, as others see it; and that asking where a thread is disturbs nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.futures import Future

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.faults.progress import OPTIMIZER, SAVING, Progress
from lightning_bucketddp.reducer.reduction import PendingReduction
from tests.support.programs import REPOSITORY


def test_asking_for_frames_locks_no_thread_for_ever() -> None:
    # Garbage collection under a lock of the interpreter's stopped all threads of a rank, once in some thousand runs.
    subprocess.run(
        [sys.executable, "-m", "tests.support.scripts.looking_at_frames"], cwd=REPOSITORY, check=True, timeout=60
    )


def blocked() -> Progress:
    """That of a rank whose training thread, this one, has been in its phase for long."""
    progress = BucketDDPStrategy()._progress
    progress.follow_this_thread()
    progress.since -= 10
    return progress


def test_a_rank_that_waits_for_a_bucket_is_seen_to_wait() -> None:
    progress = blocked()
    lock = threading.Lock()
    lock.acquire()
    seen: list[bool] = []

    def look() -> None:
        seen.append(progress.is_waiting)
        lock.release()

    threading.Timer(0.3, look).start()
    # As torch's own: neither `wait` has a frame in Python.
    PendingReduction(0, SimpleNamespace(wait=lock.acquire)).wait()
    assert seen == [True]
    with pytest.raises(RuntimeError) as raised:
        PendingReduction(0, SimpleNamespace(wait=partial(torch.ones(3).view, 7))).wait()
    assert progress.was_waiting(raised.value)


def test_a_rank_that_waits_for_a_communication_hook_is_seen_to_wait() -> None:
    progress = blocked()
    future: Future[Any] = Future()
    seen: list[bool] = []

    def look() -> None:
        seen.append(progress.is_waiting)
        future.set_exception(RuntimeError("Application timeout caused pair closure"))

    threading.Timer(0.3, look).start()
    with pytest.raises(RuntimeError, match="timeout") as raised:
        future.wait()
    assert seen == [True]
    assert progress.was_waiting(raised.value)


def test_a_phase_that_raises_is_left_and_named_to_whoever_reports_the_error() -> None:
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
