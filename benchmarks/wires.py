"""What gradients travel as, and what it costs: fp32, bf16 and int8 take turns in one run.

    python -m benchmarks.wires --model gpt2 --device cuda
    python -m benchmarks.loopback --rate 1gbit python -m benchmarks.wires --model mlp

`x bf16` is the median of bf16 over that of the row: above 1.0 is faster.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.command import parser_of, place_of, turns_of, write
from benchmarks.loop import Loop, LoopSettings
from benchmarks.models import WORKLOADS
from benchmarks.ranks import Ranks
from benchmarks.report import Table
from benchmarks.turns import take_turns
from benchmarks.variants import ALONE, WIRES, our_variants, settling_in


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, repetitions=20, ranks=2)
    parser.add_argument("--model", choices=WORKLOADS, nargs="+", default=["mlp"], help="(default: mlp)")
    parser.add_argument("--steps", type=int, default=5, help="measured in each turn (default: 5)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    write([measure(args, model) for model in args.model], args, place=str(place_of(args)))


def measure(args: argparse.Namespace, model: str) -> Table:
    """Milliseconds per step and MiB on the wire, by what travels."""
    ours = [replace(variant, name=wire) for wire in WIRES for variant in our_variants(wire=wire)]
    variants = settling_in(args.settle, [ALONE, *ours])
    settings = LoopSettings(model, tuple(variants), steps=args.steps)
    with Ranks(Loop, settings, place_of(args)) as ranks:
        samples = take_turns(turns_of(ranks, variants), repetitions=args.repetitions, seconds=args.seconds)
        # All ranks together, through the interface that they share.
        sent = {name: ranks.slowest("bytes_sent", name) / 2**20 / args.ranks for name in samples}
    medians = {name: statistics.median(values) * 1000 for name, values in samples.items()}
    rows = {
        name: [median, min(samples[name]) * 1000, max(samples[name]) * 1000, medians["bf16"] / median, sent[name]]
        for name, median in medians.items()
    }
    columns = ("ms", "min", "max", "x bf16", "MiB sent by a rank")
    table = Table(f"{model}, {place_of(args)}", columns, rows, samples=samples)
    print(table, flush=True)
    return table


if __name__ == "__main__":
    main()
