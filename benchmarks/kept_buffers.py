"""What it saves to keep the memory of buckets from step to step, instead of taking new memory in each backward.

    python -m benchmarks.kept_buffers --model mlp
    python -m benchmarks.kept_buffers --model resnet50 gpt2 --device cuda

Both take turns within one run, through the Trainer, and the ratio of their medians is printed. Buckets have a fixed
size, because a plan that is computed anew in each fit may differ.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.command import parser_of, place_of, turns_of, write
from benchmarks.fits import OpenFits
from benchmarks.loop import LoopSettings
from benchmarks.models import WORKLOADS
from benchmarks.ranks import Ranks
from benchmarks.report import Table
from benchmarks.turns import take_turns
from benchmarks.variants import Variant, settling_in

KEPT = Variant("memory is kept", "ours", {"bucket_cap_mb": 25})
NEW = replace(KEPT, name="new memory in each backward", takes_memory=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, repetitions=30, ranks=2)
    parser.add_argument("--model", choices=WORKLOADS, nargs="+", default=["mlp"], help="(default: mlp)")
    parser.add_argument("--steps", type=int, default=10, help="measured in each turn (default: 10)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    write([measure(args, model) for model in args.model], args, place=str(place_of(args)))


def measure(args: argparse.Namespace, model: str) -> Table:
    """Milliseconds per step, with memory that is kept and with new memory."""
    settings = LoopSettings(model, tuple(settling_in(args.settle, [KEPT, NEW])), steps=args.steps)
    with Ranks(OpenFits, settings, place_of(args)) as ranks:
        turns = turns_of(ranks, settings.variants)
        samples = take_turns(turns, repetitions=args.repetitions, seconds=args.seconds)
        ranks.call("close")
    scaled = {name: [1000 * seconds for seconds in values] for name, values in samples.items()}
    medians = {name: statistics.median(values) for name, values in scaled.items()}
    rows = {
        name: [median, 100 * (median / medians[KEPT.name] - 1), len(scaled[name])] for name, median in medians.items()
    }
    title = f"{model} through the trainer, {place_of(args)}"
    table = Table(title, ["ms", "more than with memory that is kept, %", "rounds"], rows, samples=scaled)
    print(table, flush=True)
    return table


if __name__ == "__main__":
    main()
