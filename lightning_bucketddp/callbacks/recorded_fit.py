"""The steps of one fit that are recorded: which ones, and what is left of them in memory and on disk."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import suppress
from pathlib import Path

import torch

from lightning_bucketddp.planning.backward_profile import Profile
from lightning_bucketddp.recording.marked_steps import plan_of, step_of
from lightning_bucketddp.recording.record import RecordedPlan, Step, Tuning
from lightning_bucketddp.recording.record_file import RecordFile, Thinning
from lightning_bucketddp.recording.typical_step import NUM_STEPS
from lightning_bucketddp.reducer.step_recorder import MarkedStep, StepRecorder
from lightning_bucketddp.strategies.trainer_step import TrainerStepHooks


class RecordedFit:
    """Has every n-th round recorded, and reads it when the device has come to its end.

    A round is one batch, or those that are accumulated, with the optimizer's step at its end, or the steps of several.

    Args:
        strategy: whose steps these are.
        every_n_rounds: how often.
        folder: where they are written; None: nowhere.
    """

    def __init__(self, strategy: TrainerStepHooks, *, every_n_rounds: int, folder: Path | None) -> None:
        self.run = strategy.describe_run()
        # Those that are written, if any are: what is read from the file gives the same summary.
        self.steps: deque[Step] = deque(maxlen=NUM_STEPS)
        # Of the last step that was read, and whether the last round has brought one.
        self.overlap = 0.0
        self.has_news = False
        self._strategy = strategy
        self._every_n_rounds = every_n_rounds
        self._recorder = StepRecorder(strategy.root_device)
        self._unread: deque[tuple[MarkedStep, bool]] = deque()
        self._not_taken: list[Step] = []
        self._num_rounds = 0
        self._num_batches = 0
        self._thinning = Thinning()
        self._is_written = False
        self._plan_cache: dict[int, RecordedPlan] = {}
        self._known_profile: Profile | None = None
        self._file = None if folder is None else RecordFile(folder, rank=self.run.rank)
        if self._file is not None:
            self._file.write(self.run)

    @property
    def profile(self) -> Profile | None:
        """What was measured for `bucket_cap_mb="auto"`, on rank 0."""
        return None if self._strategy.reducer is None else self._strategy.reducer.profile

    @property
    def plan(self) -> RecordedPlan | None:
        """The plan of the last step."""
        return self._plan_cache.get(self.steps[-1].plan) if self.steps else None

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
        self.has_news = False
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
                self.overlap, self.has_news = step.overlap, True
                self._not_taken.append(step)
                if self._file is None or is_written:
                    self.steps.append(step)
                if is_written and self._file is not None:
                    self._file.write(step)
        if all_of_them:
            self._write_profile()

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
        if reducer.bucket_set is not None and marked.plan not in self._plan_cache:
            plan = self._plan_cache[marked.plan] = plan_of(marked.plan, reducer.bucket_set.plan, reducer.specs)
            if self._file is not None:
                self._file.write(plan)
        self._write_profile()

    def _write_profile(self) -> None:
        reducer, profile = self._strategy.reducer, self.profile
        if reducer is not None and profile is not None and profile is not self._known_profile:
            self._known_profile = profile
            if self._file is not None:
                self._file.write(profile)
                self._file.write(Tuning(reducer.tuning))


def _peak_memory(device: torch.device) -> int:
    """The most memory that was in use so far: what torch took of a GPU, or the process of a host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0  # not known
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
