"""What ended a run: which rank, how, and where it was."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.multiprocessing.spawn import ProcessException

# Of frameworks. A failure is sent through the store and read by every rank, so it is short.
_NUM_FRAMES = 8
_NUM_CHARACTERS = 2000
_FRAMEWORKS = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"}
_NOT_INSTALLED = ("<frozen", sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))
_FRAME = re.compile(r'  File "(.*)", line \d+.*\n(?:    .*\n)*')


class RankFailedError(RuntimeError):
    """Another rank has failed, and training needs all of them."""

    stack = ""  # where that rank has raised, which it shows itself; "" if it was not by an exception


class Kind(str, Enum):
    """How a rank failed."""

    RAISED = "raised"
    DIED = "died"
    STALLED = "stalled"
    STOPPED = "stopped"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failure of a run, which every rank learns."""

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
            what=_in_words(error),
            where=where,
            process=this_process(),
            stack=format_stack(traceback.extract_tb(error.__traceback__)),
        )

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Failure:
        """Return the failure that `dataclasses.asdict` was given, also after a way through JSON."""
        return cls(**{**content, "kind": Kind(content["kind"])})

    def is_of(self, error: BaseException) -> bool:
        """Return whether `error` is this failure, rather than a consequence of it."""
        return self.what == _in_words(error)

    def summary(self) -> str:
        """Return which rank failed, how and where, in plain words."""
        who = f"Rank {self.rank}" + (f" ({self.process})" if self.process else "")
        where = f" in {self.where}" if self.where else ""
        return {
            Kind.RAISED: f"{who} failed{where}: {self.what}",
            Kind.DIED: f"{who} died{where}: {self.what}.",
            Kind.STALLED: f"{who} is stuck{where}: {self.what}.",
            Kind.STOPPED: f"{who} was told to stop{where} by {signal_name(self.signal)}.",
            Kind.LOST: f"{who} can no longer be reached{where}: {self.what}.",
        }[self.kind]

    def describe(self) -> str:
        """Return the summary; then the stack, if there is one."""
        return self.summary() + self._titled_stack

    @property
    def _titled_stack(self) -> str:
        return f"\nIts stack, innermost call last:\n{self.stack.rstrip()}" if self.stack else ""

    def error_for(self, rank: int) -> RankFailedError:
        """Return the error for `rank`, which has not failed by an exception of its own."""
        why = "another rank failed first" if rank != self.rank else "the others no longer wait for it"
        has_raised = self.kind is Kind.RAISED
        about = self.summary() if has_raised else self.describe()
        error = RankFailedError(f"Rank {rank} is stopping because {why}.\n{about}")
        error.stack = self._titled_stack if has_raised else ""
        return error


@dataclass(frozen=True)
class ShortTracebacks:
    """A `sys.excepthook` that shows errors that came through this package without frames of frameworks (`_shown`)."""

    previous: Callable[..., Any]

    @classmethod
    def install(cls) -> None:
        cls.uninstall()
        sys.excepthook = cls(sys.excepthook)

    @classmethod
    def uninstall(cls) -> None:
        """Restore the hook, unless another one has been installed since."""
        if isinstance(sys.excepthook, cls):
            sys.excepthook = sys.excepthook.previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if any(frame.f_code.co_filename.startswith(_NOT_INSTALLED[-1]) for frame, _ in traceback.walk_tb(trace)):
            show_error(self.previous, error)
        else:
            self.previous(kind, error, trace)


def chain_of(error: BaseException, *, with_contexts: bool = True) -> Iterator[BaseException]:
    """Yield `error` and what it was raised from or after, each once: `raise error from error` makes a circle."""
    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and not any(one is other for other in seen):
        seen.append(one)
        yield one
        one = one.__cause__ or (one.__context__ if with_contexts else None)


def show_error(show: Callable[..., Any], error: BaseException) -> None:
    """Show an error at the end of a program by `show`, a `sys.excepthook`."""
    for one in chain_of(error):
        one.__traceback__ = None if isinstance(one, RankFailedError) else _without_frameworks(one)
    show(type(error), error, error.__traceback__)


def _without_frameworks(error: BaseException) -> TracebackType | None:
    links, link = [], error.__traceback__
    while link is not None:
        links.append(link)
        link = link.tb_next
    # Of what another process has raised, frames of this one would not help.
    says_all = isinstance(error, ProcessException) or getattr(error, "says_all", False)
    most_of_frameworks = 0 if says_all else _NUM_FRAMES
    kept: TracebackType | None = None
    for index in reversed(_shown([link.tb_frame.f_code.co_filename for link in links], most_of_frameworks)):
        kept = TracebackType(kept, links[index].tb_frame, links[index].tb_lasti, links[index].tb_lineno)
    return kept


def shorten_relayed(error: ProcessException) -> None:
    """Leave frames of torch and Lightning out of the text that another process has written."""
    kept = {*_shown(_FRAME.findall(error.msg), _NUM_FRAMES)}
    position = count()
    error.msg = _FRAME.sub(lambda frame: frame[0] if next(position) in kept else "", error.msg)
    error.args = (error.msg, *error.args[1:])


def format_stack(frames: Sequence[traceback.FrameSummary]) -> str:
    """Format the frames that help (`_shown`), outermost first."""
    lines: list[str] = []
    before = -1
    for index in _shown([frame.filename for frame in frames], _NUM_FRAMES)[-2 * _NUM_FRAMES :]:
        if (num_left_out := index - before - 1) and lines:
            lines.append(f"  ... {num_left_out} more ...\n")
        frame, before = frames[index], index
        lines.append(f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n    {frame.line}\n')
    return "".join(lines)


def _shown(files: Sequence[str], most_of_frameworks: int) -> list[int]:
    """Return which frames help: all but those of frameworks, and of these the last ones, where the error was raised."""
    own = [index for index, file in enumerate(files) if not _is_framework(file)]
    first_inside = max(own[-1] + 1 if own else 0, len(files) - most_of_frameworks)
    return [*own, *range(first_inside, len(files))]


def _is_framework(file: str) -> bool:
    """Return whether `file` belongs to Python, torch, Lightning or this package; any other may be the user's."""
    _, is_installed, path = file.rpartition("-packages/")
    return path.partition("/")[0] in _FRAMEWORKS if is_installed else file.startswith(_NOT_INSTALLED)


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}"[:_NUM_CHARACTERS]


def text_of(error: BaseException) -> str:
    """Return the text of `error`, also if its class, which may be the user's, cannot give it."""
    try:
        return str(error)
    except Exception as mistake:
        return f"<its text raises {type(mistake).__name__}>"


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
