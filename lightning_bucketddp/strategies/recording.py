"""Steps that are recorded: what the strategy for the Trainer tells a recorder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning_bucketddp.faults.progress import FORWARD, OPTIMIZER
from lightning_bucketddp.reducer.observer import NO_OBSERVER
from lightning_bucketddp.reducer.reducer import Reducer

# Whoever records has imported it; every other start would have to wait for it.
if TYPE_CHECKING:
    from lightning_bucketddp.reducer.step_recorder import MarkedStep, StepRecorder

_NOTHING = nullcontext()


class StepRecording:
    """Tells a recorder what a step does, as long as there is one."""

    def __init__(self) -> None:
        self.recorder: StepRecorder | None = None
        self._on_recorded: Callable[[MarkedStep], None] | None = None

    def begin(self, recorder: StepRecorder, on_recorded: Callable[[MarkedStep], None]) -> None:
        """Record steps from now on; `on_recorded` gets each when the optimizer has stepped."""
        self.recorder, self._on_recorded = recorder, on_recorded

    def end(self, reducer: Reducer | None) -> None:
        """Record nothing any more."""
        if self.recorder is not None:
            self.recorder.forget_phase()
        self.recorder = self._on_recorded = None
        if reducer is not None:
            reducer.observer = NO_OBSERVER

    def batch_arrived(self) -> None:
        """End the phase in which the Trainer waits for a batch."""
        if self.recorder is not None and self.recorder.phase == "data":
            self.recorder.turn_to(None)

    def forward(self, reducer: Reducer | None) -> AbstractContextManager[Any]:
        """Record what happens inside as forward, and have `reducer` tell of the backward that follows."""
        if self.recorder is not None and reducer is not None:
            reducer.observer = self.recorder
        return self.during(FORWARD)

    def during(self, phase: str) -> AbstractContextManager[Any]:
        """Record what happens inside as `phase`."""
        return _NOTHING if self.recorder is None else self.recorder.during(phase)

    @property
    def phase(self) -> str | None:
        """What the step is doing; None: nothing that is recorded."""
        return None if self.recorder is None else self.recorder.phase

    def optimizer_begins(self) -> None:
        """Record what follows as the optimizer's step."""
        if self.recorder is not None:
            self.recorder.turn_to(OPTIMIZER)

    def complete_step(self, reducer: Reducer | None, *, step: int, phase: str | None) -> None:
        """End a recorded step, after the optimizer's, and go on with the `phase` from before, if there was one."""
        if self.recorder is None or reducer is None:
            return
        assert self._on_recorded is not None
        bucket_set = reducer.bucket_set
        version, buckets = (0, []) if bucket_set is None else (bucket_set.version, bucket_set.buckets)
        self._on_recorded(self.recorder.complete(reducer.stats, step=step, plan=version, buckets=buckets))
        if phase is not None:  # within a `training_step` that optimizes by itself
            self.recorder.turn_to(phase)
