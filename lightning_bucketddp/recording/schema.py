"""The file that each rank writes about its run, one JSON object per line, and the record of all ranks.

Note: one clock
    Each rank has its own clock, and the clocks differ. But no rank has the result of a reduction before every rank has
    contributed, so a reduction ends on all ranks at nearly the same moment. To show several ranks side by side, shift
    their times until these ends agree.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from lightning_bucketddp.planning.cost import Codec, Codecs, Profile, share_of_a_link
from lightning_bucketddp.reducer.observer import OuterStepStats
from lightning_bucketddp.wording import load_printable_json

FOLDER = "bucketddp"
ALL_REDUCE = "all-reduce"
PHASES = ("data", "forward", "backward", "exposed", "optimizer", "weights")
# The phases in which a step waits for other ranks: for gradients, and for weights.
WAITS = ("exposed", "weights")
_PATTERN = "rank-*.jsonl"


@dataclass(frozen=True, slots=True)
class Run:
    """The first line: the rank that writes the file, and the facts that stay the same during its run."""

    rank: int
    world_size: int
    host: str
    device: str
    backend: str
    num_parameters: int
    gradient_bytes: int
    options: dict[str, Any] = field(default_factory=dict)  # options of the strategy that affect communication
    codecs: Codecs = field(default_factory=dict)  # how long encoding takes on this device
    restarts: list[str] = field(default_factory=list)  # on rank 0: a sentence for each restart and its failure

    @property
    def num_averaging(self) -> int:
        """How many ranks average gradients in each step: those of an island, if there are islands."""
        return self.world_size // (self.options.get("num_islands") or 1)


@dataclass(frozen=True, slots=True)
class RecordedBucket:
    """One bucket of a plan: its parameters in the order their gradients arrive, and the bytes of each."""

    parameters: Sequence[str]
    sizes: Sequence[int]
    sparse: bool = False
    sharded: bool = False  # each rank steps its shard, and then the ranks exchange the weights
    collective: str = ALL_REDUCE  # or "reduce-scatter", or "reduce", where a rank gets the gradients of its shard only

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class RecordedPlan:
    """A bucket plan; the first plan of a run has version 1."""

    version: int
    buckets: Sequence[RecordedBucket]


@dataclass(frozen=True, slots=True)
class Tuning:
    """A sentence on what `bucket_cap_mb="auto"` predicted, measured and decided."""

    text: str


@dataclass(frozen=True, slots=True)
class Span:
    """The time of a phase, one of `PHASES`, or of a reduction, or of an exchange of weights."""

    name: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """When all gradients of a bucket had arrived, when its reduction was launched, and when that ended."""

    ready_s: float
    launched_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class GatherTimes:
    """When an exchange of weights started and ended; `bucket` is its index in the plan, or -1 if it has none."""

    bucket: int
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step. Times are seconds on this rank's clock (Note: one clock)."""

    step: int  # the number of optimizer steps before this one
    plan: int  # the version of the plan in use; 0 if there was none
    spans: Sequence[Span]  # the phases, in order and without overlap; each micro-batch has its own
    buckets: Sequence[BucketTimes]
    bytes_on_wire: int = 0  # that this rank passed to reductions and to exchanges of weights (Note: halves)
    num_unused: int = 0  # parameters without a gradient on this rank
    num_skipped: int = 0  # batches of all ranks without a loss
    num_replayed: int = 0  # micro-batches that were replayed as CUDA graphs
    lag_s: float | None = None  # how far the device was behind the host when backward ended; None: not measured
    memory_bytes: int = 0  # the peak so far
    gathers: Sequence[GatherTimes] = field(default_factory=list)  # exchanges of the weights of this step, in order

    @property
    def start_s(self) -> float:
        return self.spans[0].start_s

    @property
    def end_s(self) -> float:
        return self.spans[-1].end_s

    @property
    def step_s(self) -> float:
        """Return the time of all phases; validation, checkpoints and other callbacks are not part of it."""
        return sum(span.seconds for span in self.spans)

    def seconds(self, name: str) -> float:
        return sum(span.seconds for span in self.spans if span.name == name)

    def reductions(self) -> list[Span]:
        """Return when each reduction ran: from its launch, or from the end of the one before if that is later."""
        return _in_sequence(Span(f"bucket {i}", b.launched_s, b.ended_s) for i, b in enumerate(self.buckets))

    def exchanges(self) -> list[Span]:
        """Return when each exchange of weights ran, as `reductions` does."""
        return _in_sequence(Span(f"weights {times.bucket}", times.started_s, times.ended_s) for times in self.gathers)

    @property
    def communication_s(self) -> float:
        return sum(span.seconds for span in (*self.reductions(), *self.exchanges()))

    @property
    def exposed_s(self) -> float:
        return sum(map(self.seconds, WAITS))

    @property
    def own_s(self) -> float:
        return self.step_s - self.exposed_s

    @property
    def overlap(self) -> float:
        return overlap_of(self.exposed_s, self.communication_s)


def _in_sequence(transfers: Iterable[Span]) -> list[Span]:
    """Return when each of `transfers` ran: each waits until the one before has ended."""
    spans: list[Span] = []
    before = -math.inf
    for span in transfers:
        spans.append(Span(span.name, min(max(span.start_s, before), span.end_s), span.end_s))
        before = max(before, span.end_s)
    return spans


def overlap_of(exposed_s: float, communication_s: float) -> float:
    """Return the share of communication that is hidden behind computation; 1 if there is no communication."""
    return min(max(1 - exposed_s / communication_s, 0.0), 1.0) if communication_s > 0 else 1.0


def bandwidth_of(bytes_on_wire: float, communication_s: float, *, num_ranks: int) -> float:
    """Return the bytes per second on each rank's link while something travels (Note: cost of an all-reduce)."""
    return share_of_a_link(num_ranks) * bytes_on_wire / communication_s if communication_s > 0 else 0.0


Line = Run | RecordedPlan | Step | Profile | Tuning | OuterStepStats
_KINDS: dict[str, type] = {
    "run": Run,
    "plan": RecordedPlan,
    "step": Step,
    "profile": Profile,
    "tuning": Tuning,
    "outer_step": OuterStepStats,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"


def write(line: Line, file: TextIO) -> None:
    """Append `line` and flush, so that the file can be read while the run goes on."""
    file.write(json.dumps({"kind": _NAMES[type(line)], **_fields(line)}, default=_fields) + "\n")
    file.flush()


def _fields(value: Any) -> dict[str, Any]:
    # Not `asdict`, which copies everything and takes several times as long: this runs between steps.
    return {name: getattr(value, name) for name in value.__slots__}


def read(path: Path) -> Iterator[Line]:
    """Yield the lines of a file, without an incomplete last one that a killed process left."""
    lines = path.read_text().split("\n")
    for number, text in enumerate(lines, start=1):
        if not text or number == len(lines):
            continue
        try:
            yield _parse(load_printable_json(text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"Line {number} of {path} is no record of bucketddp: {error!r}") from error


def _parse(content: dict[str, Any]) -> Line:
    kind = content.pop("kind")
    if kind == "profile":
        return Profile.from_json(json.dumps(content))
    if kind == "run":
        content["codecs"] = {name: Codec(**codec) for name, codec in content["codecs"].items()}
    if kind == "plan":
        content["buckets"] = [RecordedBucket(**bucket) for bucket in content["buckets"]]
    if kind == "step":
        content["spans"] = [Span(**span) for span in content["spans"]]
        content["buckets"] = [BucketTimes(**times) for times in content["buckets"]]
        content["gathers"] = [GatherTimes(**times) for times in content["gathers"]]
    line: Line = _KINDS[kind](**content)
    return line


@dataclass(slots=True)
class RankRecord:
    """The record of one rank: plans by version, and steps by number."""

    run: Run
    plans: dict[int, RecordedPlan] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)
    profile: Profile | None = None
    tuning: str = ""
    outer_steps: list[OuterStepStats] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The record of all ranks of a run, and a sentence for each file that is missing or was left out."""

    folder: Path
    ranks: Mapping[int, RankRecord]  # in order; never empty
    problems: Sequence[str] = ()

    @property
    def first(self) -> RankRecord:
        """Return the record of the lowest rank: its clock and its plans stand for all."""
        return next(iter(self.ranks.values()))

    @property
    def step_numbers(self) -> list[int]:
        return sorted({number for rank in self.ranks.values() for number in rank.steps})

    @property
    def last_plan(self) -> RecordedPlan | None:
        steps = self.first.steps
        return self.first.plans.get(steps[max(steps)].plan)


def find_folder(path: Path) -> Path:
    """Return the folder with the files: `path`, or the newest one below it."""
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


def read_run(folder: Path) -> RecordedRun:
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
    return RecordedRun(folder, ranks, problems + found[0].run.restarts)


def _read_rank(path: Path, problems: list[str]) -> RankRecord | None:
    """Return the record in the file of a rank; None, and add the reason to `problems`, if it cannot be read."""
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
                record.tuning = line.text
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


def align(record: RecordedRun, number: int) -> dict[int, Step]:
    """Return step `number` of the ranks that recorded it, on the clock of the first of them (Note: one clock)."""
    steps = {rank: ours.steps[number] for rank, ours in record.ranks.items() if number in ours.steps}
    first = next(iter(steps.values()))
    aligned: dict[int, Step] = {}
    for rank, step in steps.items():
        differences = [a.ended_s - b.ended_s for a, b in zip(first.buckets, step.buckets, strict=False)]
        # Without reductions ranks do not wait for each other; assume that they began together.
        by_s = statistics.median(differences) if differences else first.start_s - step.start_s
        aligned[rank] = replace(
            step,
            spans=[Span(s.name, s.start_s + by_s, s.end_s + by_s) for s in step.spans],
            buckets=[BucketTimes(b.ready_s + by_s, b.launched_s + by_s, b.ended_s + by_s) for b in step.buckets],
            gathers=[GatherTimes(g.bucket, g.started_s + by_s, g.ended_s + by_s) for g in step.gathers],
        )
    return aligned


def shown_steps(record: RecordedRun, *, most_bars: int = 100_000) -> list[int]:
    """Return the steps to draw: all, or every n-th plus the slowest and the last, so that a browser opens the page."""
    numbers = record.step_numbers
    steps = [step for rank in record.ranks.values() for step in rank.steps.values()]
    every = -(-sum(len(step.spans) + len(step.buckets) + len(step.gathers) for step in steps) // most_bars)
    if every <= 1:
        return numbers
    slowest = max(steps, key=lambda step: step.step_s).step
    return sorted({*numbers[::every], numbers[-1], slowest})
