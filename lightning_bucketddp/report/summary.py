"""What a fit spent its steps on, in a table for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from lightning_bucketddp.core.config import MIB
from lightning_bucketddp.report.marked_steps import bandwidth_of
from lightning_bucketddp.report.record import RecordedPlan, Run, Step

PHASES = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "exposed": "exposed communication",
    "optimizer": "optimizer",
}
_NUM_NAMED = 2


@dataclass(frozen=True, slots=True)
class RankNumbers:
    """What one rank has to say of its steps. Medians; times are seconds.

    Attributes:
        rank: who says it.
        host: on which machine.
        num_steps: how many steps these are the medians of.
        phases: the time of each phase.
        communication_s: how long reductions ran.
        overlap: the share of that which was hidden.
        bytes_on_wire: what the rank gave to reductions.
        bandwidth: bytes per second on its link while they ran.
        memory_bytes: the most memory that was in use.
    """

    rank: int
    host: str
    num_steps: int
    phases: dict[str, float]
    communication_s: float
    overlap: float
    bytes_on_wire: float
    bandwidth: float
    memory_bytes: int

    @classmethod
    def of(cls, run: Run, steps: Sequence[Step]) -> RankNumbers:
        def median(values: Sequence[float]) -> float:
            return statistics.median(values) if values else 0.0

        return cls(
            rank=run.rank,
            host=run.host,
            num_steps=len(steps),
            phases={phase: median([step.seconds(phase) for step in steps]) for phase in PHASES},
            communication_s=median([step.communication_s for step in steps]),
            overlap=median([step.overlap for step in steps]),
            bytes_on_wire=median([step.bytes_on_wire for step in steps]),
            bandwidth=median([bandwidth_of(step, num_ranks=run.world_size) for step in steps]),
            memory_bytes=max((step.memory_bytes for step in steps), default=0),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> RankNumbers:
        return cls(**content)

    @property
    def step_s(self) -> float:
        return sum(self.phases.values())

    @property
    def exposed_s(self) -> float:
        return self.phases["exposed"]

    @property
    def own_s(self) -> float:
        """What the rank needs for itself, without waiting for others."""
        return self.step_s - self.exposed_s


def slowest_of(ranks: Sequence[RankNumbers]) -> tuple[RankNumbers, float]:
    """The rank that the others wait for, and by how many seconds it is slower than most of them."""
    slowest = max(ranks, key=lambda rank: rank.own_s)
    others = [rank.own_s for rank in ranks if rank is not slowest]
    return slowest, slowest.own_s - statistics.median(others) if others else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """The phases of a step, and lines below them."""

    title: str
    seconds: dict[str, float]
    lines: Sequence[str]

    @classmethod
    def of(
        cls,
        ranks: Sequence[RankNumbers],
        plan: RecordedPlan | None,
        steps: Sequence[Step],
        *,
        suggestions: Sequence[str],
    ) -> Summary:
        """Of the numbers of all ranks, and the steps of rank 0 with the plan that it has now."""
        seconds = {phase: statistics.fmean(rank.phases[phase] for rank in ranks) for phase in PHASES}
        num_steps, num_ranks = ranks[0].num_steps, len(ranks)
        lines = [*_about_communication(ranks, plan), *_about_late_bucket(plan, steps)]
        if num_ranks > 1:
            slowest, by_s = slowest_of(ranks)
            share = by_s / max(slowest.step_s, 1e-9)
            lines.append(
                f"Slowest rank: {slowest.rank} on {slowest.host}, {_ms(by_s)} ({share:.0%}) slower than the others."
            )
        largest = max(ranks, key=lambda rank: rank.memory_bytes)
        lines.append(f"Memory: {largest.memory_bytes / MIB:,.0f} MiB at most, on rank {largest.rank}.")
        lines += [f"Suggestion {n}: {text}" for n, text in enumerate(suggestions, start=1)]
        steps_in_words = "1 recorded step" if num_steps == 1 else f"{num_steps} recorded steps"
        ranks_in_words = "on 1 rank" if num_ranks == 1 else f"on {num_ranks} ranks"
        return cls(f"bucketddp: {steps_in_words} {ranks_in_words}", seconds, lines)


def print_summary(summary: Summary) -> None:
    """Print on the terminal, in a notebook, or into a file."""
    console = Console(highlight=False)
    console.print(summary.title)
    table = Table()
    for name in ("one step", "ms", "%"):
        table.add_column(name, justify="left" if name == "one step" else "right")
    total = sum(summary.seconds.values())
    for phase, seconds in summary.seconds.items():
        table.add_row(PHASES[phase], f"{1e3 * seconds:.2f}", f"{100 * seconds / max(total, 1e-9):.1f}")
    table.add_section()
    table.add_row("all", f"{1e3 * total:.2f}", "100.0")
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    for line in summary.lines:
        console.print(line, markup=False, soft_wrap=True)


def _about_communication(ranks: Sequence[RankNumbers], plan: RecordedPlan | None) -> list[str]:
    if plan is None:
        return []
    mean = statistics.fmean
    num_buckets = len(plan.buckets)
    return [
        f"Communication: {_ms(mean(rank.communication_s for rank in ranks))}, of which"
        f" {mean(rank.overlap for rank in ranks):.0%} is hidden;"
        f" {mean(rank.bytes_on_wire for rank in ranks) / MIB:.2f} MiB in"
        f" {num_buckets} bucket{'' if num_buckets == 1 else 's'} at"
        f" {mean(rank.bandwidth for rank in ranks) * 8 / 1e9:.2f} Gbit/s."
    ]


def _about_late_bucket(plan: RecordedPlan | None, steps: Sequence[Step]) -> list[str]:
    """The bucket that steps wait for longest, if they wait."""
    steps = [step for step in steps if plan is not None and step.plan == plan.version and step.buckets]
    waits = [[_wait_for(step, index) for step in steps] for index in range(len(steps[0].buckets) if steps else 0)]
    medians = [statistics.median(seconds) for seconds in waits]
    if plan is None or not any(medians):
        return []
    late = medians.index(max(medians))
    bucket = plan.buckets[late]
    names = [f"`{name}`" for name in bucket.parameters]
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return [
        f"Late bucket: {late + 1} of {len(plan.buckets)}, {bucket.num_bytes / MIB:.2f} MiB"
        f" ({', '.join(names[:_NUM_NAMED])}{more}): steps wait {_ms(medians[late])} for it."
    ]


def _wait_for(step: Step, index: int) -> float:
    """How long `step` waited while the reduction of a bucket ran."""
    reduction = step.reductions()[index]
    return sum(
        max(min(span.end_s, reduction.end_s) - max(span.start_s, reduction.start_s), 0.0)
        for span in step.spans
        if span.name == "exposed"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
