"""What `BucketDDPMonitor` adds to a step through the Trainer: as it is by default, and with every step recorded.

    python -m benchmarks.monitor_overhead --model mlp
    python -m benchmarks.monitor_overhead --model gpt2 --device cuda

Fits with and without it take turns within one run, and the ratio of their medians is printed. Buckets have a fixed
size, because a plan that is computed anew in each fit may differ.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.command import parser_of, place_of, turns_of, write
from benchmarks.fits import Fits
from benchmarks.loop import LoopSettings
from benchmarks.models import WORKLOADS
from benchmarks.ranks import Ranks
from benchmarks.report import Table
from benchmarks.turns import take_turns
from benchmarks.variants import Variant, settling_in

_CAP_MB = 25
PLAIN = Variant("no monitor", "ours", {"bucket_cap_mb": _CAP_MB})
# Every tenth step is recorded by default.
VARIANTS = [
    PLAIN,
    replace(PLAIN, name="monitor", records_every=10),
    replace(PLAIN, name="monitor, every step", records_every=1),
]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, repetitions=30, ranks=2)
    parser.add_argument("--model", choices=WORKLOADS, nargs="+", default=["mlp"], help="(default: mlp)")
    parser.add_argument("--steps", type=int, default=50, help="measured in each fit (default: 50)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    write([measure(args, model) for model in args.model], args, place=str(place_of(args)))


def measure(args: argparse.Namespace, model: str) -> Table:
    """Milliseconds per step, with and without a monitor."""
    settings = LoopSettings(model, tuple(settling_in(args.settle, VARIANTS)), steps=args.steps)
    with Ranks(Fits, settings, place_of(args)) as ranks:
        turns = turns_of(ranks, settings.variants)
        samples = take_turns(turns, repetitions=args.repetitions, seconds=args.seconds)
    table = table_of_ratios(f"{model} through the trainer, {place_of(args)}", samples)
    print(table, flush=True)
    return table


def table_of_ratios(title: str, samples: Mapping[str, Sequence[float]]) -> Table:
    """Medians, and by how much they are more than without a monitor."""
    scaled = {name: [1000 * seconds for seconds in values] for name, values in samples.items()}
    medians = {name: statistics.median(values) for name, values in scaled.items()}
    rows = {name: [median, 100 * (median / medians[PLAIN.name] - 1)] for name, median in medians.items()}
    return Table(title, ["ms", "more than without, %"], rows, samples=scaled)


if __name__ == "__main__":
    main()
