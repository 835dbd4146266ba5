"""What a rank writes down of its run: lines of JSON, read back by `bucketddp report`.

Note: one clock
    Each rank has a clock of its own, and nobody sets them. But no rank has a reduction's result before every rank has
    given its part, so a reduction ends on all of them at nearly the same moment. Whoever shows several ranks side by
    side shifts their times until these ends agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from lightning_bucketddp.planning.backward_profile import Profile

FOLDER = "bucketddp"


@dataclass(frozen=True, slots=True)
class Run:
    """What stays the same all the time.

    Attributes:
        rank: who writes.
        world_size: how many ranks there are.
        host: the machine's name.
        device: what trains, in words.
        backend: what the ranks talk through.
        num_parameters: how many parameters the module has.
        gradient_bytes: the size of all gradients.
        options: the strategy's options that matter here, by name.
    """

    rank: int
    world_size: int
    host: str
    device: str
    backend: str
    num_parameters: int
    gradient_bytes: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordedBucket:
    """One bucket of a plan: its parameters in order of arrival, and the bytes of each."""

    parameters: Sequence[str]
    sizes: Sequence[int]
    sparse: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class RecordedPlan:
    """A plan, and which of the run's plans it is: the first has version 1."""

    version: int
    buckets: Sequence[RecordedBucket]


@dataclass(frozen=True, slots=True)
class Tuning:
    """What `bucket_cap_mb="auto"` has predicted, measured and decided, in words."""

    story: str


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasts: `data`, `forward`, `backward`, `exposed` (waiting for reductions), `optimizer`."""

    name: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """When all gradients of a bucket were there, when it was launched, and when its reduction had ended."""

    ready_s: float
    launched_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step, or what was recorded of it. Times are seconds on this rank's clock (Note: one clock).

    Attributes:
        step: the optimizer's steps before this one.
        plan: the version of the plan that was used; 0: none.
        spans: what the step was spent on, in order, without overlap; each micro-batch has its own.
        buckets: the reductions, by bucket.
        bytes_on_wire: what this rank gave to the reductions.
        num_unused: gradients that were missing on this rank.
        num_skipped: ranks that had nothing to contribute.
        memory_bytes: the most memory that was in use so far.
    """

    step: int
    plan: int
    spans: Sequence[Span]
    buckets: Sequence[BucketTimes]
    bytes_on_wire: int = 0
    num_unused: int = 0
    num_skipped: int = 0
    memory_bytes: int = 0

    @property
    def start_s(self) -> float:
        return self.spans[0].start_s

    @property
    def end_s(self) -> float:
        return self.spans[-1].end_s

    def seconds(self, name: str) -> float:
        """How long spans of this name lasted, all together."""
        return sum(span.seconds for span in self.spans if span.name == name)

    def reductions(self) -> list[Span]:
        """The reductions one after the other: one runs when its bucket is launched and the one before has ended."""
        spans: list[Span] = []
        before = 0.0
        for index, bucket in enumerate(self.buckets):
            start = min(max(bucket.launched_s, before), bucket.ended_s)
            spans.append(Span(f"bucket {index}", start, bucket.ended_s))
            before = max(before, bucket.ended_s)
        return spans

    def waits(self) -> list[float]:
        """How long the step waited while the reduction of each bucket ran; all together at most what was exposed."""
        return [
            sum(
                max(min(span.end_s, reduction.end_s) - max(span.start_s, reduction.start_s), 0.0)
                for span in self.spans
                if span.name == "exposed"
            )
            for reduction in self.reductions()
        ]

    @property
    def communication_s(self) -> float:
        """How long reductions ran."""
        return sum(span.seconds for span in self.reductions())

    @property
    def exposed_s(self) -> float:
        """How long the step waited for them."""
        return self.seconds("exposed")

    @property
    def overlap(self) -> float:
        """The share of communication that was hidden behind backward; 1 if there was none."""
        communication_s = self.communication_s
        if communication_s <= 0:
            return 1.0
        return min(max(1 - self.exposed_s / communication_s, 0.0), 1.0)


Line = Run | RecordedPlan | Step | Profile | Tuning

_KINDS: dict[str, type] = {"run": Run, "plan": RecordedPlan, "step": Step, "profile": Profile, "tuning": Tuning}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def path_of(folder: Path, rank: int) -> Path:
    """Where a rank writes."""
    return folder / f"rank-{rank}.jsonl"


def write(line: Line, file: TextIO) -> None:
    """Append a line, whole and at once: a reader may come while the run goes on."""
    file.write(json.dumps({"kind": _NAMES[type(line)], **_fields(line)}, default=_fields) + "\n")
    file.flush()


def _fields(value: Any) -> dict[str, Any]:
    # Not `asdict`, which copies all that there is and takes several times as long: this runs between steps.
    return {name: getattr(value, name) for name in value.__slots__}


def read(path: Path) -> Iterator[Line]:
    """The lines of a rank, but for one at the end that a killed process has left incomplete."""
    lines = path.read_text().split("\n")
    for number, text in enumerate(lines, start=1):
        if not text or number == len(lines):
            continue
        try:
            yield _parse(json.loads(text))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"Line {number} of {path} is no record of bucketddp: {error!r}") from error


def _parse(content: dict[str, Any]) -> Line:
    kind = content.pop("kind")
    if kind == "profile":
        return Profile.from_json(json.dumps(content))
    if kind == "plan":
        content["buckets"] = [RecordedBucket(**bucket) for bucket in content["buckets"]]
    if kind == "step":
        content["spans"] = [Span(**span) for span in content["spans"]]
        content["buckets"] = [BucketTimes(**times) for times in content["buckets"]]
    line: Line = _KINDS[kind](**content)
    return line
