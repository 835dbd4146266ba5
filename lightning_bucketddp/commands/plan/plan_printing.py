"""The plan of a module, and what it promises, for people to read."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_bucketddp.commands.plan.scaling import ModulePlan, Scaling
from lightning_bucketddp.config import MIB
from lightning_bucketddp.planning.plan import BucketSpec

# Where nobody looks at a terminal, lines are as long as they want.
_PIPED_WIDTH = 160
_BAR_LENGTH = 30
_ABOUT_CPUS = (
    "These are times of a CPU. The efficiency below holds for training on such CPUs and says nothing about GPUs: they"
    " compute far faster, and wait as long for the network. For GPUs run this on one, or pass --profile or"
    " --backward-ms of one."
)


def print_plan(plan: ModulePlan) -> None:
    """First the buckets, then where times come from, then what follows for each network."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    with console.capture() as printed:
        console.print(Text(_headline(plan), style="bold"))
        console.print(f"({plan.origin})", markup=False)
        console.print(_buckets(plan))
        console.print(f"\nTimes: {_times(plan)}", markup=False)
        if plan.scalings and plan.times.is_of_cpu:
            console.print(Text(_ABOUT_CPUS, style="bold yellow"))
        for scaling in plan.scalings:
            console.print(Text(f"\n{scaling.assumed}", style="bold"))
            console.print(_summary(scaling, plan.num_ranks), markup=False)
            console.print(_scaling(scaling))
        if plan.scalings:
            console.print(
                "\nAll of it is simulated: reductions one after the other, a link of its own for each rank, nobody"
                " late. Efficiency is the share of a step that is not spent waiting.",
                markup=False,
            )
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))


def _headline(plan: ModulePlan) -> str:
    profile = plan.profile
    mib = sum(spec.num_bytes for spec in profile.specs) / MIB
    buckets = f"{len(plan.buckets)} bucket{'' if len(plan.buckets) == 1 else 's'}"
    return (
        f"{plan.module}: {len(profile.specs):,} parameter tensors, {mib:,.2f} MiB of gradients in {buckets},"
        f" for training on {plan.device}"
    )


def _buckets(plan: ModulePlan) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for column in ("bucket", "MiB", "tensors"):
        table.add_column(column, justify="right")
    table.add_column("from the first to the last gradient that arrives", overflow="fold")
    for index, bucket in enumerate(plan.buckets):
        size = "sparse" if bucket.sparse else f"{plan.bytes_of(bucket) / MIB:.2f}"
        table.add_row(str(index), size, str(len(bucket.members)), Text(_contents(plan, bucket)))
    return table


def _contents(plan: ModulePlan, bucket: BucketSpec) -> str:
    names = plan.names_in(bucket)
    if not names:
        return "(flags only)"
    text = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
    return f"{text} (reduced where it is)" if bucket.alone else text


def _times(plan: ModulePlan) -> str:
    if not plan.scalings:
        return (
            f"{plan.times.origin}. So nothing is predicted: pass --profile FILE of a run or --backward-ms MS, or give"
            " the module an `example_input_array`."
        )
    profile = plan.profile
    parts = {"forward": profile.forward_s, "backward": profile.backward_s, "optimizer": profile.optimizer_s}
    known = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in parts.items() if seconds > 0)
    unknown = " and ".join(name for name, seconds in parts.items() if seconds <= 0)
    rest = f" Not known, and counted as nothing: {unknown}." if unknown else ""
    return f"{known}; {plan.times.origin}.{rest}"


def _summary(scaling: Scaling, num_ranks: int) -> str:
    timeline = scaling.by_ranks[num_ranks].timeline
    if num_ranks == 1:
        return f"On 1 rank a step takes {timeline.step_s * 1e3:.2f} ms, and there is nothing to wait for."
    return (
        f"On {num_ranks:,} ranks a step takes {timeline.step_s * 1e3:.2f} ms, and {timeline.exposed_s * 1e3:.2f} ms of"
        f" it are spent waiting for reductions: {timeline.overlap:.0%} of {timeline.communication_s * 1e3:.2f} ms of"
        " communication are hidden."
    )


def _scaling(scaling: Scaling) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for column in ("ranks", "buckets", "waits ms", "step ms", "overlap", "efficiency"):
        table.add_column(column, justify="right")
    table.add_column("")
    for num_ranks, predicted in scaling.by_ranks.items():
        timeline = predicted.timeline
        is_alone = num_ranks == 1
        table.add_row(
            f"{num_ranks:,}",
            "-" if is_alone else str(len(predicted.plan)),
            f"{timeline.exposed_s * 1e3:.2f}",
            f"{timeline.step_s * 1e3:.2f}",
            "-" if is_alone else f"{timeline.overlap:.0%}",
            f"{timeline.scaling_efficiency:.1%}",
            Text("█" * round(_BAR_LENGTH * timeline.scaling_efficiency), style="blue"),
        )
    return table
