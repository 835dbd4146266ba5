"""What `shard_optimizer` saves and costs: optimizer state, peak memory and time of a step, with AdamW.

    python -m benchmarks.sharding --model gpt2_shapes
    python -m benchmarks.sharding --model gpt2 resnet50 --device cuda --seconds 60

Variants take turns within one run and medians are compared. Several ranks on one GPU share it: start MPS first.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.command import parser_of, place_of, turns_of, write
from benchmarks.fits import Fits
from benchmarks.loop import Loop, LoopSettings
from benchmarks.models import WORKLOADS
from benchmarks.peaks import Peaks
from benchmarks.ranks import Ranks
from benchmarks.report import Table
from benchmarks.turns import take_turns
from benchmarks.variants import ALONE, Variant, ddp_variants, our_variants, settling_in

MIB = 2**20


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, repetitions=20, ranks=2)
    parser.add_argument("--model", choices=WORKLOADS, nargs="+", default=["gpt2_shapes"], help="(default: gpt2_shapes)")
    parser.add_argument("--steps", type=int, default=5, help="measured in each turn (default: 5)")
    parser.add_argument("--trainer", action="store_true", help="measure through the real Trainer, too")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure memory, too")
    return parser.parse_args(arguments)


def variants_of(settle: int | None) -> list[Variant]:
    """The same training without communication, without sharding and with it, and by torch DDP's best flags."""
    [ours] = our_variants()
    sharded = replace(ours, name="bucketddp, sharded", options={**ours.options, "shard_optimizer": True})
    return settling_in(settle, [ALONE, ours, sharded, ddp_variants()[-1]])


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    tables = [table for model in args.model for table in measure(args, model)]
    write(tables, args, place=str(place_of(args)))


def measure(args: argparse.Namespace, model: str) -> list[Table]:
    """Tables of one model, each printed when it is ready."""
    settings = LoopSettings(model, tuple(variants_of(args.settle)), steps=args.steps, optimizer="adamw")
    of = f"{model}, AdamW, {place_of(args)}"
    tables = []

    def add(title: str, samples: dict[str, list[float]], *, unit: str, scale: float) -> None:
        scaled = {name: [value * scale for value in values] for name, values in samples.items()}
        whole = statistics.median(scaled[settings.variants[1].name])
        rows = {
            name: [min(values), statistics.median(values), max(values), statistics.median(values) / whole]
            for name, values in scaled.items()
        }
        columns = [f"{unit}, min", "median", "max", "x unsharded"]
        tables.append(Table(f"{title} of {of}", columns, rows, samples=scaled))
        print(tables[-1], flush=True)

    with Ranks(Loop, settings, place_of(args)) as ranks:
        turns = turns_of(ranks, settings.variants)
        steps = take_turns(turns, repetitions=args.repetitions, seconds=args.seconds)
        add("step", steps, unit="ms", scale=1000)
        state = {variant.name: ranks.call("state_bytes", variant.name) for variant in settings.variants}
        add("optimizer state on each rank", state, unit="MiB", scale=1 / MIB)
        sent = {variant.name: ranks.call("bytes_sent", variant.name)[:1] for variant in settings.variants}
        add("sent by all ranks in a step", sent, unit="MiB", scale=1 / MIB)
        if args.memory:
            # Others than those that have trained: what they have left would be freed while a step is measured. Those
            # are still there, because MPS does not take clients while it ends for want of any.
            with Ranks(Peaks, settings, place_of(args)) as fresh:
                names = [variant.name for variant in settings.variants]
                peaks = {name: [float(peak) for peak in fresh.call("peak", name, 1)] for name in names}
            add("peak memory on each rank", peaks, unit="MiB", scale=1 / MIB)
    if args.trainer:
        with Ranks(Fits, settings, place_of(args)) as ranks:
            turns = turns_of(ranks, settings.variants)
            fits = take_turns(turns, repetitions=args.repetitions, seconds=args.seconds)
            add("step through the Trainer", fits, unit="ms", scale=1000)
    return tables


if __name__ == "__main__":
    main()
