"""A `training_step` that returns None on some ranks, or on all: agreed on, where Lightning's loop would refuse it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class SkippedStep:
    """What the strategy makes of None: there is no loss, but a backward in which this rank contributes nothing."""

    loss: Tensor


def accept_skipped_steps(automatic_optimization: Any) -> None:
    """Have this loop take a `SkippedStep` from `training_step`, and report no loss for it."""
    result_class: Any = type(automatic_optimization).output_result_cls

    class ResultOrSkip(result_class):
        @classmethod
        def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> Any:
            if not isinstance(training_step_output, SkippedStep):
                return super().from_training_step_output(training_step_output, normalize)
            result = cls(training_step_output.loss)
            result.loss = None
            return result

    automatic_optimization.output_result_cls = ResultOrSkip
