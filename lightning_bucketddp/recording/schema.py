"""The file that each rank writes about its run: one JSON object per line, read back by `bucketddp report`.

Note: one clock
    Each rank has a clock of its own, and nobody sets them. But no rank has the result of a reduction before every rank
    has given its part, so a reduction ends on all of them at nearly the same moment. To show several ranks side by
    side, shift their times until these ends agree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from lightning_bucketddp.planning.cost import Codec, Codecs, Profile, share_of_a_link
from lightning_bucketddp.reducer.observer import OuterStepStats
from lightning_bucketddp.wording import load_printable_json

FOLDER = "bucketddp"
ALL_REDUCE = "all-reduce"
PHASES = ("data", "forward", "backward", "exposed", "optimizer", "weights")
# Those in which a step waits for other ranks: for gradients, and for weights.
WAITS = ("exposed", "weights")


@dataclass(frozen=True, slots=True)
class Run:
    """The first line: the rank that writes the file, and what stays the same during its run."""

    rank: int
    world_size: int
    host: str
    device: str
    backend: str
    num_parameters: int
    gradient_bytes: int
    options: dict[str, Any] = field(default_factory=dict)  # of the strategy, which affect communication
    codecs: Codecs = field(default_factory=dict)  # what encoding takes on this device
    restarts: Sequence[str] = ()  # when the run went on after a failure, and after which; on rank 0


@dataclass(frozen=True, slots=True)
class RecordedBucket:
    """One bucket of a plan: its parameters in the order their gradients arrive, and the bytes of each."""

    parameters: Sequence[str]
    sizes: Sequence[int]
    sparse: bool = False
    sharded: bool = False  # each rank steps a share of it, and the ranks exchange the weights then
    collective: str = ALL_REDUCE  # or "reduce-scatter", or "reduce", of gradients of which a rank keeps its share only

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

    story: str


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of a step, one of `PHASES`; or a reduction, or an exchange of weights."""

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
    """When an exchange of weights was started and when it ended; `bucket` is an index in the plan, -1: in no longer."""

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
    memory_bytes: int = 0  # the peak so far
    # Exchanges of the weights that the step has changed, in order.
    gathers: Sequence[GatherTimes] = field(default_factory=list)

    @property
    def start_s(self) -> float:
        return self.spans[0].start_s

    @property
    def end_s(self) -> float:
        return self.spans[-1].end_s

    @property
    def step_s(self) -> float:
        """Return the time of all phases, without what ran between them: validation, checkpoints, other callbacks."""
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
    """Return when each of `transfers` ran, of which some wait until the one before has ended."""
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
        content["codecs"] = {name: Codec(**codec) for name, codec in content.get("codecs", {}).items()}
    if kind == "plan":
        content["buckets"] = [RecordedBucket(**bucket) for bucket in content["buckets"]]
    if kind == "step":
        content["spans"] = [Span(**span) for span in content["spans"]]
        content["buckets"] = [BucketTimes(**times) for times in content["buckets"]]
        content["gathers"] = [GatherTimes(**times) for times in content.get("gathers", [])]
    line: Line = _KINDS[kind](**content)
    return line
