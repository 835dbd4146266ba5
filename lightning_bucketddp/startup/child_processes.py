"""The processes that a rank has launched, and the one that has launched it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning_bucketddp.faults.failure import signal_name

LAUNCHER_PID = "BUCKETDDP_LAUNCHER_PID"
# What a process may need to end by itself, once it has been told why.
_GRACE_S = 3.0


class ChildProcesses:
    """Those of one Lightning launcher; none where something else launches.

    Args:
        launcher: one of ours.
        rank: of this process.
        local_rank: of this process.
    """

    def __init__(self, launcher: Any, *, rank: int, local_rank: int) -> None:
        self._processes: tuple[subprocess.Popen[bytes], ...] = getattr(launcher, "children", ())
        self._rank = rank
        self._launcher_pid = int(os.environ.get(LAUNCHER_PID, 0)) if local_rank > 0 else 0
        if "TORCHELASTIC_RUN_ID" in os.environ:
            self._launcher_pid = os.getppid()  # torchrun's agent, which offers the store

    def find_failure(self) -> str | None:
        """Whether a process has ended that the start needs."""
        for rank, process in enumerate(self._processes, start=self._rank + 1):
            if (status := process.poll()) is not None:
                how = f"with exit status {status}" if status >= 0 else f"by {signal_name(-status)}"
                return (
                    f"Rank {rank} (process {process.pid}) ended {how} before all ranks had joined. Its output says why."
                )
        if self._launcher_pid and not _is_running(self._launcher_pid):
            return (
                f"Rank {self._rank} has lost the process that launched it ({self._launcher_pid}): that one has ended."
            )
        return None

    @contextmanager
    def ended_on_failure(self) -> Iterator[None]:
        """If what is inside raises, leave no process behind."""
        try:
            yield
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        until = time.monotonic() + _GRACE_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(until - time.monotonic(), 0))
            process.kill()  # nothing, if it has ended
            process.wait()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with suppress(OSError):  # not every platform tells
        # Its name, which may hold anything, ends with the last parenthesis.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in ("Z", "X")  # it has ended, and whoever started it has not looked yet
    return True
