"""Host time per parameter that data-parallel training adds to `zero_grad` + backward, on one rank.

    python -m benchmarks.host_overhead
    python -m benchmarks.host_overhead --device cuda --model tiny_layers

`tiny_layers` is 500 parameters of 8 elements; the others have as many parameters and buckets as their models, cut down
until nothing is left to compute. On the CPU this is CPU time of the thread, so what other programs do does not count;
with a GPU it is the time until the host has launched everything. One rank has nobody to exchange gradients with, and
bucketddp then leaves them alone; so what it does among several ranks is measured, too.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.command import parser_of, place_of, turns_of, write
from benchmarks.host_time import HostTime
from benchmarks.loop import LoopSettings
from benchmarks.models import SHRUNK_BY, build
from benchmarks.ranks import Ranks
from benchmarks.report import Table, best_ddp
from benchmarks.turns import take_turns
from benchmarks.variants import ALONE, Variant, ddp_variants, our_variants, settling_in

REDUCING = "bucketddp, as among several ranks"
MODELS = ("tiny_layers", "resnet50_shapes", "gpt2_shapes")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, repetitions=60, ranks=1)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=MODELS, help="(default: all)")
    args = parser.parse_args(arguments)
    write([measure(args, model) for model in args.model], args, place=str(place_of(args)))


def measure(args: argparse.Namespace, model: str) -> Table:
    """Microseconds per parameter over the step without communication, by variant."""
    [ours] = our_variants()
    reducing = replace(ours, name=REDUCING, reduces_alone=True)
    variants = settling_in(args.settle, [ours, reducing, *ddp_variants()])
    if model != "tiny_layers":
        variants = [_with_small_buckets(variant) for variant in variants]
    settings = LoopSettings(model, (ALONE, *variants))
    with Ranks(HostTime, settings, place_of(args)) as ranks:
        turns = turns_of(ranks, settings.variants)
        samples = take_turns(turns, repetitions=args.repetitions, seconds=args.seconds)
        buckets = {variant.name: ranks.call("num_buckets", variant.name)[0] for variant in variants}
    num_parameters = len(list(build(model, torch.device("cpu")).model.parameters()))
    medians = {name: statistics.median(values) / num_parameters for name, values in samples.items()}
    alone = medians.pop(ALONE.name)
    added = {name: median - alone for name, median in medians.items()}
    best = best_ddp(added)
    rows = {name: [value, value / best, buckets[name]] for name, value in added.items()}
    title = f"{model}, {num_parameters} parameters, {place_of(args)}; the step alone: {alone:.2f} us each"
    table = Table(title, ["us per parameter", "x best ddp", "buckets"], rows, samples=samples)
    print(table, flush=True)
    return table


def _with_small_buckets(variant: Variant) -> Variant:
    return replace(variant, options={**variant.options, "bucket_cap_mb": 25 / SHRUNK_BY})


if __name__ == "__main__":
    main()
