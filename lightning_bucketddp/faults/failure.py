"""What ended a run: which rank, how, and where it was."""

from __future__ import annotations

import os
import signal
import socket
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from lightning_bucketddp.wording import printable

# A failure travels through the store and is read by every rank: enough to find the line.
_NUM_FRAMES = 8
_NUM_FRAMES_OF_USER = 3
_NUM_CHARACTERS = 2000
_MOST_CHARACTERS_SHOWN = 20_000
_LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, str(Path(__file__).parents[1]))


class RankFailedError(RuntimeError):
    """Another rank has failed, and training needs all of them."""


class Kind(str, Enum):
    """How a rank failed."""

    RAISED = "raised"
    DIED = "died"
    STALLED = "stalled"
    STOPPED = "stopped"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failure of a run, as every rank learns it."""

    rank: int
    kind: Kind
    what: str  # the exception, the way it died, or what it is stuck in; in words
    where: str = ""  # what it was doing
    process: str = ""  # its host and process
    signal: int = 0  # what it has received; 0 if no signal stopped it
    stack: str = ""  # where it was in the program
    hosts: str = ""  # the addresses of those that cannot end their connections themselves, with spaces between them

    @classmethod
    def of(cls, error: BaseException, *, rank: int, where: str) -> Failure:
        return cls(
            rank=rank,
            kind=Kind.RAISED,
            what=f"{type(error).__name__}: {error}"[:_NUM_CHARACTERS],
            where=where,
            process=this_process(),
            stack=format_stack(traceback.extract_tb(error.__traceback__)),
        )

    @classmethod
    def from_dict(cls, content: Any) -> Failure | None:
        """Return the failure that `dataclasses.asdict` was given, also after a way through JSON; None if it is none."""
        try:
            failure = cls(**{**content, "kind": Kind(content["kind"])})
        except (TypeError, ValueError, KeyError):
            return None
        return failure if all(type(getattr(failure, f.name)).__name__ == f.type for f in fields(cls)) else None

    def describe(self) -> str:
        """Return which rank failed, how and where, in plain words; then its stack, if there is one."""
        who = f"Rank {self.rank}" + (f" ({self.process})" if self.process else "")
        where = f" in {self.where}" if self.where else ""
        sentence = {
            Kind.RAISED: f"{who} failed{where}: {self.what}",
            Kind.DIED: f"{who} died{where}: {self.what}.",
            Kind.STALLED: f"{who} is stuck{where}: {self.what}.",
            Kind.STOPPED: f"{who} was told to stop{where} by {signal_name(self.signal)}.",
            Kind.LOST: f"{who} can no longer be reached{where}: {self.what}.",
        }[self.kind]
        stack = f"\nIts stack, innermost call last:\n{self.stack.rstrip()}" if self.stack else ""
        # It may have come through the store, to which anyone can write who reaches it.
        return printable((sentence + stack)[:_MOST_CHARACTERS_SHOWN])

    def summary(self) -> str:
        """Return `describe` without the stack."""
        return replace(self, stack="").describe()

    def error_for(self, rank: int) -> RankFailedError:
        """Return the error for `rank` to raise, which has not failed by an exception of its own."""
        why = "another rank failed first" if rank != self.rank else "the others no longer wait for it"
        return RankFailedError(f"Rank {rank} is stopping because {why}. {self.describe()}")


def format_stack(frames: Sequence[traceback.FrameSummary]) -> str:
    """Format the innermost frames, and the innermost ones of the user's program, outermost first."""
    own = [index for index, frame in enumerate(frames) if not _is_library(frame.filename)][-_NUM_FRAMES_OF_USER:]
    shown = sorted({*own, *range(max(len(frames) - _NUM_FRAMES, 0), len(frames))})
    lines: list[str] = []
    for position, index in enumerate(shown):
        if num_left_out := index - shown[position - 1] - 1 if position > 0 else 0:
            lines.append(f"  ... {num_left_out} more ...\n")
        lines += traceback.format_list([frames[index]])
    return "".join(lines)


def _is_library(file: str) -> bool:
    """Return whether `file` belongs to Python, to a package that is installed, or to this one."""
    return "site-packages" in file or "dist-packages" in file or file.startswith(("<frozen", *_LIBRARIES))


def this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def signal_name(number: int) -> str:
    """Return a signal in words, as in "signal 9 (SIGKILL)"."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def describe_exit(status: int | None) -> str:
    """Return how a process ended by its exit status: negative for a signal, as in `subprocess`; None: not known."""
    if status is None:
        return "it ended silently (only its parent process knows the exit status)"
    if status >= 0:
        return f"it ended with exit status {status} in the middle of the run"
    hint = ", often the kernel's when memory runs out" if -status == signal.SIGKILL else ""
    return f"it was killed by {signal_name(-status)}{hint}"
