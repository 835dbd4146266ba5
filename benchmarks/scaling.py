"""What data-parallel training adds to a step, against the number of parameters, bytes, buckets and ranks.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --against parameters --parameters 100 1000 10000

A cost is the time of a step less that of the same step without communication. "best ddp" is the fastest of torch DDP's
variants at each size. A cost that grows as size^1 is linear; below 1, a part of it is the same at every size. On one
rank of a CPU, as against parameters, it is CPU time of the thread. More ranks than cores measure the machine.
"""

from __future__ import annotations

import argparse
import math
import operator
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.command import parser_of, place_of, write
from benchmarks.ranks import Place, Ranks
from benchmarks.report import Table, best_ddp
from benchmarks.sized_steps import Size, SizedSettings, SizedSteps
from benchmarks.turns import take_turns
from benchmarks.variants import ALONE, Variant, ddp_variants, our_variants, settling_in

# Also where there is one rank, which would have nothing to do.
OURS = replace(our_variants()[0], reduces_alone=True)
MIB = 1024 * 1024
UNITS = {"parameters": "parameter", "bytes": "MiB", "buckets": "bucket", "ranks": "rank"}


@dataclass(frozen=True)
class Costs:
    """Seconds that a step costs more than without communication, by size, and what they are medians of."""

    ours: Mapping[int, float]
    ddp: Mapping[int, float]
    samples: Mapping[str, Sequence[float]]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, repetitions=20, ranks=2)
    parser.add_argument("--against", choices=UNITS, nargs="+", default=list(UNITS), help="(default: all)")
    sizes = {
        "parameters": (100, 300, 1000, 3000, 10000),
        "bytes": (1, 4, 16, 64),
        "buckets": (1, 2, 4, 8, 16, 32, 64),
        "processes": (1, 2, 4, 8),
    }
    for name, default in sizes.items():
        what = "MiB of gradients" if name == "bytes" else f"numbers of {name}"
        text = f"{what} (default: {' '.join(map(str, default))})"
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default, metavar="N", help=text)
    parser.add_argument("--steps", type=int, default=3, help="measured in each turn (default: 3)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    tables = []
    with Measurement(args) as measurement:
        for what in args.against:
            found = AGAINST[what](args, measurement)
            print(*found, sep="\n", flush=True)
            tables += found
    write(tables, args, place=str(place_of(args)))


class Measurement:
    """Measures on ranks that are kept until another number of them is wanted."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._place: Place | None = None
        self._ranks = ExitStack()

    def __enter__(self) -> Measurement:
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.close()

    def costs(self, sizes: Mapping[int, Size], *, place: Place, caps: Mapping[int, float] | None = None) -> Costs:
        """What a step costs at each size; with `caps` for `bucket_cap_mb`, by how many buckets there are then."""
        args = self._args
        variants = tuple(settling_in(args.settle, [ALONE, OURS, *ddp_variants()]))
        of_size = dict.fromkeys(sizes, variants)
        if caps is not None:
            of_size = {
                at: (variants[0], *[_with_cap(variant, cap) for variant in variants[1:]]) for at, cap in caps.items()
            }
        ranks = self._ranks_at(place, SizedSettings(sizes, of_size, args.steps))
        turns = {f"{at} {v.name}": partial(ranks.slowest, "turn", at, v.name) for at in sizes for v in variants}
        samples = take_turns(turns, repetitions=args.repetitions, seconds=args.seconds)
        ours, ddp = {}, {}
        for at in sizes:
            # What was measured one after the other is compared: a machine that gets busy slows both.
            alone = samples[f"{at} {ALONE.name}"]
            costs = {v.name: statistics.median(map(operator.sub, samples[f"{at} {v.name}"], alone)) for v in variants}
            size = at if caps is None else ranks.call("num_buckets", at, OURS.name)[0]
            ours[size], ddp[size] = costs[OURS.name], best_ddp(costs)
        return Costs(ours, ddp, samples)

    def _ranks_at(self, place: Place, settings: SizedSettings) -> Ranks:
        if place != self._place:
            self._ranks.close()
            self._place, self._current = place, self._ranks.enter_context(Ranks(SizedSteps, settings, place))
        else:
            self._current.build(SizedSteps, settings)
        return self._current


def against_parameters(args: argparse.Namespace, measurement: Measurement) -> list[Table]:
    place = replace(place_of(args), num_ranks=1)
    costs = measurement.costs({number: Size(number, 8) for number in args.parameters}, place=place)
    return tables_of("parameters", f"parameters of 8 elements, {place}", costs)


def against_bytes(args: argparse.Namespace, measurement: Measurement) -> list[Table]:
    place = place_of(args)
    costs = measurement.costs({mib: Size(16, mib * MIB // 4 // 16) for mib in args.bytes}, place=place)
    return tables_of("bytes", f"MiB in 16 parameters, {place}", costs)


def against_buckets(args: argparse.Namespace, measurement: Measurement) -> list[Table]:
    # So small that it costs more to send a bucket than what is in it.
    size = Size(64, 1024)
    num_bytes = size.num_parameters * size.num_elements * 4
    caps = {number: num_bytes / MIB / number for number in args.buckets}
    costs = measurement.costs(dict.fromkeys(args.buckets, size), place=place_of(args), caps=caps)
    return tables_of("buckets", f"buckets of {num_bytes // 1024} KiB in all, {place_of(args)}", costs)


def against_ranks(args: argparse.Namespace, measurement: Measurement) -> list[Table]:
    places = {number: replace(place_of(args), num_ranks=number) for number in args.processes}
    of_each = [measurement.costs({number: Size(64, MIB // 16)}, place=place) for number, place in places.items()]
    costs = Costs(
        ours={number: cost for costs in of_each for number, cost in costs.ours.items()},
        ddp={number: cost for costs in of_each for number, cost in costs.ddp.items()},
        samples={name: values for costs in of_each for name, values in costs.samples.items()},
    )
    backend = "NCCL" if args.device == "cuda" else "gloo"
    return tables_of("ranks", f"ranks ({backend}), 16 MiB, {len(os.sched_getaffinity(0))} cores", costs)


AGAINST = {
    "parameters": against_parameters,
    "bytes": against_bytes,
    "buckets": against_buckets,
    "ranks": against_ranks,
}


def tables_of(what: str, where: str, costs: Costs) -> list[Table]:
    """Milliseconds at each size, and microseconds for each unit of it, which stay the same where growth is linear."""
    # One rank has nobody to talk to: what it costs belongs to no line through the others.
    fitted = [at for at in costs.ours if what != "ranks" or at > 1]
    ours, ddp = (exponent({at: cost[at] for at in fitted}) for cost in (costs.ours, costs.ddp))
    grows = f"cost grows as {what}^{ours:.2f} (bucketddp) and ^{ddp:.2f} (best ddp)"
    columns = [OURS.name, "best ddp"]
    total = {str(at): [1e3 * costs.ours[at], 1e3 * costs.ddp[at]] for at in costs.ours}
    each = {str(at): [1e6 * costs.ours[at] / at, 1e6 * costs.ddp[at] / at] for at in costs.ours}
    return [
        Table(f"ms against {where}: {grows}", columns, total, plot="lines", samples=costs.samples),
        Table(f"us per {UNITS[what]} against {where}", columns, each, plot="lines"),
    ]


def exponent(costs: Mapping[int, float]) -> float:
    """The k of cost = c * size^k that fits best; nan if there are not two costs to fit.

    Where a cost is lost in the noise, so that it is not above zero, it is left out.
    """
    points = [(math.log(size), math.log(cost)) for size, cost in costs.items() if cost > 0]
    if len(points) < 2:
        return math.nan
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def _with_cap(variant: Variant, cap: float) -> Variant:
    return replace(variant, options={**variant.options, "bucket_cap_mb": cap})


if __name__ == "__main__":
    main()
