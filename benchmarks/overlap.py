"""How well communication is hidden: the time of a step against limits that are measured in the same run.

    python -m benchmarks.overlap --model mlp
    python -m benchmarks.overlap --model gpt2 --device cuda

    efficiency = (forward + max(backward, communication) + optimizer) / step

Forward, backward and optimizer are those of the same loop without communication; communication is the variant's own
buckets, all-reduced back to back. 1.0 is a step that wastes nothing: all that can be hidden is.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.command import cap, parser_of, place_of, turns_of, write
from benchmarks.limits import Limits
from benchmarks.loop import LoopSettings
from benchmarks.models import WORKLOADS
from benchmarks.ranks import Ranks
from benchmarks.report import Table, table_of
from benchmarks.turns import take_turns
from benchmarks.variants import ALONE, WIRES, ddp_variants, our_variants, settling_in

PHASES = ("forward", "backward", "optimizer")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, repetitions=20, ranks=2)
    parser.add_argument("--model", choices=WORKLOADS, default="mlp", help="(default: mlp)")
    parser.add_argument("--wire", choices=WIRES, default="fp32", help="what travels (default: fp32)")
    parser.add_argument("--bucket-cap-mb", type=cap, nargs="+", default=[], help="of bucketddp (default: its own)")
    parser.add_argument("--steps", type=int, default=5, help="measured in each turn (default: 5)")
    args = parser.parse_args(arguments)
    variants = (*our_variants(caps=args.bucket_cap_mb, wire=args.wire), *ddp_variants(wire=args.wire))
    settings = LoopSettings(args.model, tuple(settling_in(args.settle, (ALONE, *variants))), steps=args.steps)
    with Ranks(Limits, settings, place_of(args)) as ranks:
        samples = measure(ranks, settings, repetitions=args.repetitions, seconds=args.seconds)
    table = table_of_limits(f"{args.model}, {place_of(args)}, {args.wire} wire", samples)
    print(table, flush=True)
    write([table], args, place=str(place_of(args)))


def measure(
    ranks: Ranks, settings: LoopSettings, *, repetitions: int, seconds: float | None
) -> dict[str, dict[str, list[float]]]:
    """Seconds per step (`step`), of communication alone (`communication`) and of each phase, by variant."""
    variants = [variant for variant in settings.variants if variant.kind != "alone"]
    turns: dict[tuple[str, str], Any] = {("phases", ""): partial(ranks.call, "phases", ALONE.name)}
    turns |= {("step", name): turn for name, turn in turns_of(ranks, settings.variants).items()}
    turns |= {("communication", name): turn for name, turn in turns_of(ranks, variants, "communicate").items()}
    found: dict[str, dict[str, list[Any]]] = {"step": {}, "communication": {}, "phases": {}}
    for (what, name), values in take_turns(turns, repetitions=repetitions, seconds=seconds).items():
        found[what][name] = values
    by_rank = found["phases"].pop("")
    found["phases"] = {phase: [max(rank[phase] for rank in ranks) for ranks in by_rank] for phase in PHASES}
    return found


def table_of_limits(title: str, samples: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    """Milliseconds of steps, and efficiencies."""
    communication, phases = (
        {name: statistics.median(values) * 1000 for name, values in samples[what].items()}
        for what in ("communication", "phases")
    )
    parts = ", ".join(f"{phase} {taken:.2f} ms" for phase, taken in phases.items())
    steps = table_of(f"{title}; alone: {parts}", samples["step"], unit="ms", scale=1000)
    rows = {}
    for name, row in steps.rows.items():
        hidden = max(phases["backward"], communication.get(name, 0.0))
        limit = phases["forward"] + hidden + phases["optimizer"]
        rows[name] = [*row, communication.get(name, float("nan")), limit / row[0]]
    return replace(steps, columns=[*steps.columns, "communication ms", "efficiency"], rows=rows)


if __name__ == "__main__":
    main()
