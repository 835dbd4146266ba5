"""The steps of one fit that are recorded: which ones, and what is left of them in memory and on disk."""

from __future__ import annotations

import resource
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path

import torch

from lightning_bucketddp.core.profile import Profile
from lightning_bucketddp.core.recorder import MarkedStep, StepRecorder
from lightning_bucketddp.report.marked_steps import plan_of, step_of
from lightning_bucketddp.report.record import RecordedPlan, Step
from lightning_bucketddp.report.record_file import RecordFile, Thinning
from lightning_bucketddp.strategies.recording import RecordsSteps

# So many steps are kept in memory, for the summary.
_NUM_KEPT = 1000


class RecordedFit:
    """Has every n-th round recorded, and reads it when the device has come to its end.

    A round is one batch, or those that are accumulated, with the optimizer's step at its end, or the steps of several.

    Args:
        strategy: whose steps these are.
        every_n_rounds: how often.
        folder: where they are written; None: nowhere.
    """

    def __init__(self, strategy: RecordsSteps, *, every_n_rounds: int, folder: Path | None) -> None:
        self.run = strategy.describe_run()
        self.steps: deque[Step] = deque(maxlen=_NUM_KEPT)
        self.plan: RecordedPlan | None = None
        self._strategy = strategy
        self._every_n_rounds = every_n_rounds
        self._recorder = StepRecorder(strategy.root_device)
        self._unread: deque[tuple[MarkedStep, bool]] = deque()
        self._not_taken: list[Step] = []
        self._num_rounds = 0
        self._num_batches = 0
        self._thinning = Thinning()
        self._is_written = False
        self._known_plans: set[int] = set()
        self._known_profile: Profile | None = None
        self._file = None if folder is None else RecordFile(folder, rank=self.run.rank)
        if self._file is not None:
            self._file.write(self.run)

    @property
    def profile(self) -> Profile | None:
        """What was measured for `bucket_cap_mb="auto"`, on rank 0."""
        return None if self._strategy.reducer is None else self._strategy.reducer.profile

    @property
    def is_recording(self) -> bool:
        return self._strategy.recorder is not None

    def begin_if_due(self) -> None:
        """A batch is about to begin."""
        if not self.is_recording and (self._num_rounds + 1) % self._every_n_rounds == 0:
            self._is_written = self._file is not None and self._thinning.takes_next()
            self._num_batches = 0
            self._strategy.begin_recording(self._recorder, self._keep)

    def begin_fetch(self) -> None:
        """The trainer asks for a batch."""
        # A `training_step` that fetches batches by itself is not interrupted. One that was asked for and did not come,
        # because an epoch was over, is forgotten.
        if self.is_recording and self._recorder.phase in (None, "data"):
            self._recorder.forget_phase()
            self._recorder.turn_to("data")

    def begin_batch(self) -> None:
        """A batch is there."""
        self._num_batches += 1
        if self.is_recording and self._recorder.phase == "data":
            self._recorder.turn_to(None)

    def end_round(self) -> None:
        """An optimizer has stepped, or several."""
        self._num_rounds += 1
        if self.is_recording:
            self._strategy.end_recording()
            if self._is_written:
                self._thinning.add(self._num_batches)
            self.read()

    def read(self, *, all_of_them: bool = False) -> None:
        """Read steps that the device has come to the end of, or wait for all of them."""
        while self._unread and (all_of_them or self._recorder.is_past(self._unread[0][0])):
            marked, is_written = self._unread.popleft()
            step = step_of(marked, self._recorder.axis, memory_bytes=_peak_memory(self._strategy.root_device))
            if step is not None:
                self.steps.append(step)
                self._not_taken.append(step)
                if is_written and self._file is not None:
                    self._file.write(step)

    def take(self) -> list[Step]:
        """The steps that were read since this was asked."""
        steps, self._not_taken = self._not_taken, []
        return steps

    def close(self) -> None:
        """Record no more. What cannot be read without waiting is lost."""
        self._strategy.end_recording()
        with suppress(RuntimeError):  # a device that has failed
            self.read()
        self._recorder.close()
        if self._file is not None:
            self._file.close()

    def _keep(self, marked: MarkedStep) -> None:
        reducer = self._strategy.reducer
        assert reducer is not None
        self._unread.append((marked, self._is_written))
        if reducer.placement is not None and (self.plan is None or self.plan.version != marked.plan):
            self.plan = plan_of(marked.plan, reducer.placement.plan, reducer.specs)
            if marked.plan not in self._known_plans and self._file is not None:
                self._file.write(self.plan)
            self._known_plans.add(marked.plan)
        if reducer.profile is not None and reducer.profile is not self._known_profile:
            self._known_profile = reducer.profile
            if self._file is not None:
                self._file.write(reducer.profile)


def _peak_memory(device: torch.device) -> int:
    """The most memory that was in use so far: what torch took of a GPU, or the process of a host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
