"""Where this rank is in the run, written by the training thread and read by the watchdog, and how that thread is ended.

Note: no garbage collection
    To read the frames of another thread, Python makes objects for them. Before Python 3.12 this may collect garbage,
    and a tensor among it releases the GIL. The other thread then leaves the frame that is being read, which corrupts
    memory; or both wait for ever for the list of threads (python/cpython#106883). So no garbage is collected meanwhile,
    and the frames of a thread whose phases are short, as in a healthy run, are not read.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from lightning_bucketddp.faults.failure import Failure, chain_of, format_stack, text_of

_INTERRUPT_AFTER_S = 1.0
_EXIT_AFTER_S = 2.5
# Phases that several files name.
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
SAVING = "saving a checkpoint"
ABOUT_TO_SAVE = "saving together"
BETWEEN_STEPS = "callbacks"
_SET_UP = "set-up"
# In these phases, the stack shows whether data is being loaded.
_MAY_LOAD_DATA = (_SET_UP, BETWEEN_STEPS)
_DATA_LOADING = re.compile(r"/torch/utils/data/|/loops/fetchers\.py$")
# Half a step of an optimizer, or half a file, is worse than a late end.
_NOT_TO_BE_INTERRUPTED = (OPTIMIZER, SAVING)
# Within this after an optimizer's step the trainer has counted it.
_COUNTED_WITHIN_S = 0.3
# In messages of gloo and NCCL when another rank is gone, for waits that are not in `waiting_in`.
_BROKEN_CONNECTION = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer", re.IGNORECASE)
# In a phase that has lasted no longer, the stack is not read.
_BRIEF_S = 0.5
# The key among an exception's attributes under which `Progress.during` keeps the phase that it has left.
_RAISED_IN = "_bucketddp_raised_in"
# Held by the thread that has turned garbage collection off: no other may turn it on.
_COLLECTION_IS_OFF = threading.Lock()


class Progress:
    """The phase of this rank, and whether it has to end.

    Entering a phase costs the training thread next to nothing. It raises if the run is over, so that a rank ends
    between phases rather than inside one. A thread that is inside a file of `waiting_in` waits for other ranks.
    """

    def __init__(self, *, waiting_in: tuple[str, ...]) -> None:
        self.phase = _SET_UP
        self.since = time.monotonic()
        self.epoch = 0
        self.batch: int | None = None  # before the first
        self.num_phases = 0
        self.end_with: Callable[[], BaseException] | None = None
        self.describe_backward: Callable[[], str] | None = None
        self._waiting_in = waiting_in
        self._thread: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Progress:
        return Progress(waiting_in=self._waiting_in)  # a copy of the strategy takes part in no run

    def follow_this_thread(self) -> None:
        """Follow the calling thread from now on: it is the one that trains."""
        self._thread = threading.get_ident()

    def begin_set_up(self) -> None:
        """Begin another run, which knows nothing of the batches of an earlier one."""
        self._begin(_SET_UP)
        self.epoch, self.batch = 0, None

    def enter(self, phase: str) -> None:
        """Begin another phase. Raises if the run is over."""
        self._begin(phase)
        self.raise_if_over()

    def raise_if_over(self) -> None:
        if self.end_with is not None:
            raise self.end_with()

    def complete_step(self) -> None:
        """Begin what follows the optimizer's step. Never raises: the trainer has not counted the step yet."""
        self._begin(BETWEEN_STEPS)

    def _begin(self, phase: str) -> None:
        self.phase = phase
        self.since = time.monotonic()
        self.num_phases += 1

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in `phase` inside the block; afterwards the phase around it goes on, also if the block raises."""
        outer = self.phase
        self.enter(phase)
        try:
            yield
        except BaseException as error:
            # The error is reported later, in another phase.
            vars(error).setdefault(_RAISED_IN, self.describe())
            self._begin(outer)
            raise
        self.enter(outer)

    def describe_origin(self, error: BaseException) -> str:
        """Return in which phase `error`, or what it was raised from, was raised; if not known, the current one."""
        for cause in chain_of(error, with_contexts=False):
            if _RAISED_IN in vars(cause):
                return str(vars(cause)[_RAISED_IN])
        return self.describe()

    @property
    def may_be_interrupted(self) -> bool:
        """Return whether an exception may end the training thread now, without a step or a file half done."""
        is_counted = self.phase != BETWEEN_STEPS or self.seconds > _COUNTED_WITHIN_S
        return is_counted and self.phase not in _NOT_TO_BE_INTERRUPTED

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def describe(self) -> str:
        """Return the phase and the batch, in words."""
        phase, detail = self.phase, ""
        if phase == BACKWARD and self.describe_backward is not None:
            detail = self.describe_backward()
        elif phase in _MAY_LOAD_DATA and self._is_inside(lambda file: bool(_DATA_LOADING.search(file))):
            phase = "data loading"
        if self.batch is None:
            return phase
        relation = "after" if self.phase == BETWEEN_STEPS else "of"
        return f"{phase} {relation} batch {self.batch} in epoch {self.epoch}{detail}"

    @property
    def is_waiting(self) -> bool:
        """Return whether the training thread waits for other ranks, and not only for a moment."""
        return self._is_inside(lambda file: file in self._waiting_in)

    def was_waiting(self, error: BaseException) -> bool:
        """Return whether `error`, or what it was raised from, came out of a wait for other ranks."""
        for cause in chain_of(error):
            frames = traceback.extract_tb(cause.__traceback__)
            if isinstance(cause, RuntimeError) and (
                (frames and frames[-1].filename in self._waiting_in) or _BROKEN_CONNECTION.search(text_of(cause))
            ):
                return True
        return False

    def stack(self) -> str:
        frames = [(frame, frame.f_lineno) for frame in _frames_of(self._thread)]
        return format_stack(traceback.StackSummary.extract(iter(frames[::-1])))

    def _is_inside(self, matches: Callable[[str], bool]) -> bool:
        """Return whether the training thread has been in a file that `matches`, for more than a moment."""
        return self.seconds > _BRIEF_S and any(matches(frame.f_code.co_filename) for frame in _frames_of(self._thread))


def _frames_of(thread: int | None) -> list[FrameType]:
    """Return the frames of a thread, innermost first (Note: no garbage collection)."""
    with _COLLECTION_IS_OFF:
        was_on = gc.isenabled()
        try:
            gc.disable()
            innermost = sys._current_frames().get(thread or 0)
            return [] if innermost is None else [frame for frame, _ in traceback.walk_stack(innermost)]
        finally:
            if was_on:
                gc.enable()


@dataclass(eq=False)
class Shutdown:
    """Ends the thread that trains, with more and more force (docs/design/failure-protocol.md).

    It ends, in this order: at its next collective, which fails; at the beginning of its next phase; by an exception
    that a signal raises wherever its program is; by leaving the process at once. The last two wait for a checkpoint
    that is being written and for an optimizer's step. Callbacks may take `timeout_s`.
    """

    progress: Progress
    cut: Callable[[], None]
    interrupt: Callable[[], None]
    rank: int
    timeout_s: float
    has_aborted: bool = False  # this rank no longer waits for others
    # When the thread had raised, so that only callbacks run still, or was done, and when it could have; None: neither.
    raised_at: float | None = None
    _pressed_at: float | None = None

    def abort(self, failure: Failure) -> None:
        """End every collective, and make the thread end."""
        if not self.has_aborted:
            if self.raised_at is None:
                self.progress.end_with = lambda: failure.error_for(self.rank)
            self.has_aborted = True  # before, because a device may take its time
            self.cut()

    def press(self, failure: Failure) -> None:
        """Make the thread end, by stronger means the longer it takes."""
        now = time.monotonic()
        if not self.has_aborted:
            return  # all have raised together, and the program decides what it does then
        if self.raised_at is not None:
            if now - self.raised_at > self.timeout_s:
                self._exit(failure, why="its callbacks take too long")
        elif not self.progress.may_be_interrupted:
            self._pressed_at = None
        else:
            self._pressed_at = self._pressed_at or now
            if now - self._pressed_at > _EXIT_AFTER_S:
                self._exit(failure, why="it cannot be interrupted")
            elif now - self._pressed_at > _INTERRUPT_AFTER_S:
                self.interrupt()

    def _exit(self, failure: Failure, *, why: str) -> None:
        sys.stderr.write(
            f"bucketddp: rank {self.rank} exits at once in {self.progress.describe()}, because {why}."
            f" {failure.describe()}\nThe stack of rank {self.rank}, innermost call last:\n{self.progress.stack()}"
        )
        sys.stderr.flush()
        for child in multiprocessing.active_children():
            child.kill()  # data workers, which might wait for us for ever
        os._exit(1)
