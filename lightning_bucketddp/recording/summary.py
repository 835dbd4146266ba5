"""What a fit spent its steps on, in a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from lightning_bucketddp.config import MIB
from lightning_bucketddp.recording.record import RecordedPlan
from lightning_bucketddp.recording.typical_step import TypicalStep

_IN_WORDS = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "exposed": "exposed communication",
    "optimizer": "optimizer",
}
_NUM_NAMED = 2


@dataclass(frozen=True, slots=True)
class Summary:
    """The phases of a step, and lines below them."""

    title: str
    seconds: dict[str, float]
    lines: Sequence[str]

    @classmethod
    def of(cls, typical: TypicalStep, plan: RecordedPlan | None, *, suggestions: Sequence[str]) -> Summary:
        """Of the step that is typical of the fit, with the plan of its last steps."""
        lines = [] if plan is None else [*_about_communication(typical, plan), *_about_late_bucket(typical, plan)]
        if len(typical.ranks) > 1:
            lines.append(_about_straggler(typical))
        largest = max(typical.ranks, key=lambda rank: rank.memory_bytes)
        lines.append(f"Memory: {largest.memory_bytes / MIB:,.0f} MiB at most, on rank {largest.rank}.")
        lines += [f"Suggestion {n}: {text}" for n, text in enumerate(suggestions, start=1)]
        num_steps, num_ranks = typical.ranks[0].num_steps, len(typical.ranks)
        steps_in_words = "1 recorded step" if num_steps == 1 else f"{num_steps} recorded steps"
        ranks_in_words = "on 1 rank" if num_ranks == 1 else f"on {num_ranks} ranks"
        return cls(f"bucketddp: {steps_in_words} {ranks_in_words}", typical.phases, lines)


def print_summary(summary: Summary) -> None:
    """Print on the terminal, in a notebook, or into a file."""
    console = Console(highlight=False)
    console.print(summary.title)
    table = Table()
    for name in ("one step", "ms", "%"):
        table.add_column(name, justify="left" if name == "one step" else "right")
    total = sum(summary.seconds.values())
    for phase, seconds in summary.seconds.items():
        table.add_row(_IN_WORDS[phase], f"{1e3 * seconds:.2f}", f"{100 * seconds / max(total, 1e-9):.1f}")
    table.add_section()
    table.add_row("all", f"{1e3 * total:.2f}", "100.0")
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    for line in summary.lines:
        console.print(line, markup=False, soft_wrap=True)


def _about_communication(typical: TypicalStep, plan: RecordedPlan) -> list[str]:
    num_buckets = len(plan.buckets)
    return [
        f"Communication: {_ms(typical.communication_s)}, of which {typical.overlap:.0%} is hidden;"
        f" {typical.bytes_on_wire / MIB:.2f} MiB in {num_buckets} bucket{'' if num_buckets == 1 else 's'} at"
        f" {typical.bandwidth * 8 / 1e9:.2f} Gbit/s."
    ]


def _about_late_bucket(typical: TypicalStep, plan: RecordedPlan) -> list[str]:
    late = typical.late_bucket
    if late is None or late.index >= len(plan.buckets):
        return []
    bucket = plan.buckets[late.index]
    names = [f"`{name}`" for name in bucket.parameters]
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return [
        f"Late bucket: {late.index} of {len(plan.buckets)}, {bucket.num_bytes / MIB:.2f} MiB"
        f" ({', '.join(names[:_NUM_NAMED])}{more}): {1e3 * late.wait_s:.2f} of the {_ms(typical.exposed_s)} exposed are"
        " spent on it."
    ]


def _about_straggler(typical: TypicalStep) -> str:
    if typical.straggler is None:
        return "Slowest rank: none, all take about as long."
    rank, by_s = typical.straggler.rank, typical.straggler.by_s
    return (
        f"Slowest rank: {rank.rank} on {rank.host}, {_ms(by_s)} ({by_s / typical.step_s:.0%} of the step) slower than"
        f" the others. It waits {_ms(rank.exposed_s)}, for the network alone."
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
