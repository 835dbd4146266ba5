"""The processes that a rank has launched, and the one that has launched it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lightning_bucketddp.faults.failure import signal_name
from lightning_bucketddp.processes import is_launched_by_torchrun, is_running

LAUNCHER_PID = "BUCKETDDP_LAUNCHER_PID"
# How long a process may need to end by itself, once it knows why.
_GRACE_S = 3.0


class ChildProcesses:
    """The processes of one launcher of ours; none where something else launches."""

    def __init__(self, launcher: Any, *, rank: int, local_rank: int) -> None:
        self._processes: tuple[subprocess.Popen[bytes], ...] = getattr(launcher, "children", ())
        self._rank = rank
        self._launcher_pid = int(os.environ.get(LAUNCHER_PID, 0)) if local_rank > 0 else 0
        if is_launched_by_torchrun():
            self._launcher_pid = os.getppid()  # torchrun's agent, which holds the store

    def find_failure(self) -> str | None:
        """Return in words which process has ended that the start needs; None if none has."""
        for rank, process in enumerate(self._processes, start=self._rank + 1):
            if process.poll() is not None:
                return describe_end(rank, process, when=" before all ranks had joined")
        if self._launcher_pid and not is_running(self._launcher_pid):
            return (
                f"Rank {self._rank} has lost the process that launched it ({self._launcher_pid}): that one has ended."
            )
        return None

    @contextmanager
    def ended_on_failure(self) -> Iterator[None]:
        """End all of these processes if the block raises."""
        try:
            yield
        except BaseException:
            until = time.monotonic() + _GRACE_S
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(until - time.monotonic(), 0))
                process.kill()  # does nothing if it has ended
                process.wait()
            raise


def describe_end(rank: int, process: subprocess.Popen[bytes], *, when: str = "") -> str:
    """Return in words how the process of `rank` has ended."""
    status = process.returncode
    how = f"with exit status {status}" if status >= 0 else f"by {signal_name(-status)}"
    return f"Rank {rank} (process {process.pid}) ended {how}{when}. Its output says why."
