"""The files that the ranks of a run have written: which there are, and what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_bucketddp.planning.backward_profile import Profile
from lightning_bucketddp.recording.record import FOLDER, RecordedPlan, Run, Step, Tuning, read

_PATTERN = "rank-*.jsonl"


@dataclass(slots=True)
class RankRecord:
    """What one rank has written: plans by version, and steps by number."""

    run: Run
    plans: dict[int, RecordedPlan] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)
    profile: Profile | None = None
    tuning: str = ""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What all ranks have written.

    Attributes:
        folder: where it was found.
        ranks: by rank, in order; never empty.
        problems: what is not there, and why, in words.
    """

    folder: Path
    ranks: Mapping[int, RankRecord]
    problems: Sequence[str] = ()

    @property
    def first(self) -> RankRecord:
        """The lowest rank that is there: its clock and its plans hold for all."""
        return next(iter(self.ranks.values()))

    @property
    def step_numbers(self) -> list[int]:
        return sorted({number for rank in self.ranks.values() for number in rank.steps})

    @property
    def last_plan(self) -> RecordedPlan | None:
        """That of the last step."""
        steps = self.first.steps
        return self.first.plans.get(steps[max(steps)].plan)


def find_folder(path: Path) -> Path:
    """The folder with the files: `path`, or the one below it that was written to last."""
    if not path.is_dir():
        raise ValueError(f"There is no folder {path}.")
    if any(path.glob(_PATTERN)):
        return path
    files = [file for file in path.rglob(_PATTERN) if file.parent.name == FOLDER]
    if not files:
        raise ValueError(
            f"No rank has left a record in {path} or in a folder `{FOLDER}` below it. Train with"
            ' `BucketDDPStrategy(monitor=True)`, and pass the folder of that run (its "log_dir").'
        )
    return max(files, key=lambda file: file.stat().st_mtime).parent


def read_run(folder: Path) -> RunRecord:
    """The records in `folder`. Ranks that are missing or cannot be read are left out, and named in `problems`."""
    problems: list[str] = []
    found = [record for path in folder.glob(_PATTERN) if (record := _read_if_possible(path, problems)) is not None]
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
    return RunRecord(folder, ranks, problems)


def _read_if_possible(path: Path, problems: list[str]) -> RankRecord | None:
    try:
        return _read_rank(path)
    except (ValueError, OSError) as error:
        problems.append(f"{path.name} was left out: {error}")
        return None


def _read_rank(path: Path) -> RankRecord:
    record: RankRecord | None = None
    for line in read(path):
        if isinstance(line, Run):
            record = RankRecord(line)  # of several runs, the last
        elif record is None:
            raise ValueError("It does not begin with a description of the run.")
        elif isinstance(line, RecordedPlan):
            record.plans[line.version] = line
        elif isinstance(line, Profile):
            record.profile = line
        elif isinstance(line, Tuning):
            record.tuning = line.story
        elif line.spans:
            record.steps[line.step] = line
    if record is None or not record.steps:
        raise ValueError("It holds no step.")
    return record
