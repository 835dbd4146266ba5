"""Asking where a thread is disturbs nothing."""

from __future__ import annotations

import subprocess
import sys

from tests.support.programs import REPOSITORY


def test_asking_for_frames_locks_no_thread_for_ever() -> None:
    # Garbage collection under a lock of the interpreter's stopped all threads of a rank, once in some thousand runs.
    subprocess.run(
        [sys.executable, "-m", "tests.support.scripts.looking_at_frames"], cwd=REPOSITORY, check=True, timeout=60
    )
