"""Steps of all ranks on one clock (Note: one clock, in `record`), and which of them are shown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_bucketddp.recording.marked_steps import seconds_of
from lightning_bucketddp.recording.record import BucketTimes, Span, Step
from lightning_bucketddp.recording.run_files import RunRecord

# A page of so many bars is a few megabytes, and a browser opens it in a moment.
MOST_BARS = 100_000


@dataclass(frozen=True, slots=True)
class AlignedStep:
    """One step. All times are on the clock of the lowest rank that recorded it.

    Attributes:
        number: the optimizer's steps before this one.
        ranks: what each rank did, by rank; a rank that did not record the step is not there.
    """

    number: int
    ranks: Mapping[int, Step]

    @property
    def start_s(self) -> float:
        return min(step.start_s for step in self.ranks.values())

    @property
    def end_s(self) -> float:
        return max(step.end_s for step in self.ranks.values())

    @property
    def plan(self) -> int:
        return next(iter(self.ranks.values())).plan


def align(record: RunRecord, number: int) -> AlignedStep:
    """Step `number`, with the times of each rank shifted until its reductions end when those of the first do."""
    steps = {rank: ours.steps[number] for rank, ours in record.ranks.items() if number in ours.steps}
    reference = next(iter(steps.values()))
    return AlignedStep(number, {rank: _shifted(step, _shift(step, reference)) for rank, step in steps.items()})


def shown_steps(record: RunRecord, *, most_bars: int = MOST_BARS) -> list[int]:
    """The steps that are drawn: all, or as many as `most_bars` allow, evenly, with the last and the slowest."""
    numbers = record.step_numbers
    bars = [_num_bars(record, number) for number in numbers]
    every = -(-sum(bars) // most_bars)
    if every <= 1:
        return numbers
    slowest = max(numbers, key=lambda number: _seconds(record, number))
    return sorted({*numbers[::every], numbers[-1], slowest})


def _num_bars(record: RunRecord, number: int) -> int:
    steps = [rank.steps[number] for rank in record.ranks.values() if number in rank.steps]
    return sum(len(step.spans) + len(step.buckets) for step in steps)


def _seconds(record: RunRecord, number: int) -> float:
    steps = [rank.steps[number] for rank in record.ranks.values() if number in rank.steps]
    return max(seconds_of(step) for step in steps)


def _shift(step: Step, reference: Step) -> float:
    pairs = zip(step.buckets, reference.buckets, strict=False)
    differences = [theirs.ended_s - ours.ended_s for ours, theirs in pairs]
    # Without reductions, ranks do not wait for each other: that they began together is a guess.
    return statistics.median(differences) if differences else reference.start_s - step.start_s


def _shifted(step: Step, shift_s: float) -> Step:
    return replace(
        step,
        spans=[Span(span.name, span.start_s + shift_s, span.end_s + shift_s) for span in step.spans],
        buckets=[
            BucketTimes(times.ready_s + shift_s, times.launched_s + shift_s, times.ended_s + shift_s)
            for times in step.buckets
        ],
    )
