"""Read what the ranks of a run wrote, and put their steps on one clock."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_bucketddp.planning.cost import Profile
from lightning_bucketddp.recording.schema import (
    FOLDER,
    BucketTimes,
    GatherTimes,
    RecordedPlan,
    Run,
    Span,
    Step,
    Tuning,
    read,
)
from lightning_bucketddp.reducer.observer import OuterStepStats

_PATTERN = "rank-*.jsonl"
# A page with this many bars has a few megabytes, which a browser opens in a moment.
_MOST_BARS = 100_000


@dataclass(slots=True)
class RankRecord:
    """What one rank wrote: plans by version, and steps by number."""

    run: Run
    plans: dict[int, RecordedPlan] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)
    profile: Profile | None = None
    tuning: str = ""
    outer_steps: list[OuterStepStats] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What all ranks of a run wrote, and a sentence for each file that is missing or was left out."""

    folder: Path
    ranks: Mapping[int, RankRecord]  # in order; never empty
    problems: Sequence[str] = ()

    @property
    def first(self) -> RankRecord:
        """Return the lowest rank that is there: its clock and its plans stand for all."""
        return next(iter(self.ranks.values()))

    @property
    def step_numbers(self) -> list[int]:
        return sorted({number for rank in self.ranks.values() for number in rank.steps})

    @property
    def last_plan(self) -> RecordedPlan | None:
        steps = self.first.steps
        return self.first.plans.get(steps[max(steps)].plan)


def find_folder(path: Path) -> Path:
    """Return the folder with the files: `path`, or the one below it that was written to last."""
    if not path.is_dir():
        raise ValueError(f"There is no folder {path}.")
    if any(path.glob(_PATTERN)):
        return path
    files = [file for file in path.rglob(_PATTERN) if file.parent.name == FOLDER]
    if not files:
        raise ValueError(
            f"No rank has left a record in {path} or in a folder `{FOLDER}` below it. Train with"
            ' `callbacks=[BucketDDPMonitor()]`, and pass the folder of that run (its "log_dir").'
        )
    return max(files, key=lambda file: file.stat().st_mtime).parent


def read_run(folder: Path) -> RunRecord:
    """Read the files in `folder`. Ranks that are missing or cannot be read are named in `problems`."""
    problems: list[str] = []
    found = [record for path in folder.glob(_PATTERN) if (record := _read_rank(path, problems)) is not None]
    if not found:
        raise ValueError(f"No rank has recorded a step in {folder}. " + " ".join(problems))
    found.sort(key=lambda record: record.run.rank)
    world_size = found[0].run.world_size
    ranks = {record.run.rank: record for record in found if record.run.world_size == world_size}
    problems += [
        f"Rank {record.run.rank} was left out: it is of another run, with {record.run.world_size} ranks."
        for record in found
        if record.run.world_size != world_size
    ]
    missing = [rank for rank in range(world_size) if rank not in ranks]
    if missing:
        problems.append(f"Of {world_size} ranks, these are missing: {', '.join(map(str, missing))}.")
    problems += found[0].run.restarts
    return RunRecord(folder, ranks, problems)


def _read_rank(path: Path, problems: list[str]) -> RankRecord | None:
    """Return what is in the file of a rank; None, and add why to `problems`, if it cannot be read."""
    record: RankRecord | None = None
    try:
        for line in read(path):
            if isinstance(line, Run):
                record = RankRecord(line)  # the last run in the file counts
            elif record is None:
                raise ValueError("It does not begin with a description of the run.")
            elif isinstance(line, RecordedPlan):
                record.plans[line.version] = line
            elif isinstance(line, Profile):
                record.profile = line
            elif isinstance(line, Tuning):
                record.tuning = line.story
            elif isinstance(line, OuterStepStats):
                record.outer_steps.append(line)
            elif line.spans:
                record.steps[line.step] = line
        if record is None or not record.steps:
            raise ValueError("It holds no step.")
    except (ValueError, OSError) as error:
        problems.append(f"{path.name} was left out: {error}")
        return None
    return record


def align(record: RunRecord, number: int) -> dict[int, Step]:
    """Return step `number` of the ranks that recorded it, on the clock of the first of them (Note: one clock).

    The times of the others are shifted until their reductions end when those of the first do.
    """
    steps = {rank: ours.steps[number] for rank, ours in record.ranks.items() if number in ours.steps}
    first = next(iter(steps.values()))
    aligned: dict[int, Step] = {}
    for rank, step in steps.items():
        differences = [a.ended_s - b.ended_s for a, b in zip(first.buckets, step.buckets, strict=False)]
        # Without reductions, ranks do not wait for each other: that they began together is a guess.
        by_s = statistics.median(differences) if differences else first.start_s - step.start_s
        aligned[rank] = replace(
            step,
            spans=[Span(s.name, s.start_s + by_s, s.end_s + by_s) for s in step.spans],
            buckets=[BucketTimes(b.ready_s + by_s, b.launched_s + by_s, b.ended_s + by_s) for b in step.buckets],
            gathers=[GatherTimes(g.bucket, g.started_s + by_s, g.ended_s + by_s) for g in step.gathers],
        )
    return aligned


def shown_steps(record: RunRecord, *, most_bars: int = _MOST_BARS) -> list[int]:
    """Return the steps to draw: all, or an even choice within `most_bars` plus the slowest and the last."""
    numbers = record.step_numbers
    steps = [step for rank in record.ranks.values() for step in rank.steps.values()]
    every = -(-sum(len(step.spans) + len(step.buckets) + len(step.gathers) for step in steps) // most_bars)
    if every <= 1:
        return numbers
    slowest = max(steps, key=lambda step: step.step_s).step
    return sorted({*numbers[::every], numbers[-1], slowest})
