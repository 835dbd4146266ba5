"""What `shard_optimizer` saves and costs: optimizer state, peak memory and time of a step, with AdamW.

    python -m benchmarks.sharding --model gpt2_shapes
    python -m benchmarks.sharding --model gpt2 resnet50 --device cuda --seconds 60
    python -m benchmarks.sharding --model gpt2 --device cuda --seconds 60 --fsdp

Variants take turns within one run and medians are compared. Several ranks on one GPU share it: start MPS first.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from benchmarks.command import parser_of, place_of, turns_of, write
from benchmarks.fits import Fits
from benchmarks.loop import Loop, LoopSettings
from benchmarks.models import WORKLOADS
from benchmarks.own_processes import OwnProcesses, without_failed
from benchmarks.peaks import Peaks
from benchmarks.ranks import Place, Ranks
from benchmarks.report import Table
from benchmarks.turns import take_turns
from benchmarks.variants import ALONE, Variant, ddp_variants, our_variants, settling_in, sharded_variants

MIB = 2**20


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, repetitions=20, ranks=2)
    parser.add_argument("--model", choices=WORKLOADS, nargs="+", default=["gpt2_shapes"], help="(default: gpt2_shapes)")
    parser.add_argument("--steps", type=int, default=5, help="measured in each turn (default: 5)")
    parser.add_argument("--trainer", action="store_true", help="measure through the real Trainer, too")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure memory, too")
    parser.add_argument("--fsdp", action="store_true", help="only compare with FSDP and FSDP2, through the Trainer")
    return parser.parse_args(arguments)


def variants_of(settle: int | None) -> list[Variant]:
    """The same training without communication, without sharding and with it, and by torch DDP's best flags."""
    [ours] = our_variants()
    sharded = replace(ours, name="bucketddp, sharded", options={**ours.options, "shard_optimizer": True})
    return settling_in(settle, [ALONE, ours, sharded, ddp_variants()[-1]])


def strategies(device: str) -> tuple[Variant, ...]:
    """What is compared through the Trainer, each in processes of its own. The first FSDP needs a GPU."""
    variants = [ddp_variants()[-1], *our_variants(), *sharded_variants()]
    return tuple(variant for variant in variants if device == "cuda" or variant.kind != "fsdp")


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    tables = []
    for model in args.model:
        for table in compare_fsdp(args, model) if args.fsdp else measure(args, model):
            print(table, flush=True)
            tables.append(table)
            write(tables, args, place=str(place_of(args)))


def compare_fsdp(args: argparse.Namespace, model: str) -> Iterator[Table]:
    """Tables of one model, with FSDP."""
    variants = tuple(settling_in(args.settle, strategies(args.device)))
    settings = LoopSettings(model, variants, steps=args.steps, optimizer="adamw")
    title = f"{model}, AdamW, {place_of(args)}, through the Trainer"
    return compare(settings, place_of(args), repetitions=args.repetitions, seconds=args.seconds, title=title)


def compare(
    settings: LoopSettings, place: Place, *, repetitions: int, seconds: float | None, title: str
) -> Iterator[Table]:
    """Time of a step and peak memory, each variant in processes of its own; the first is what all are compared with."""
    with OwnProcesses(settings, {"": place}) as fits:
        fits.first_steps()
        rounds = take_turns(fits.turns(""), repetitions=repetitions, seconds=seconds)
    done = without_failed(rounds)
    times = {name: [turn.seconds for turn in turns] for name, turns in done.items()}
    # The first turn has steps in it that are made once: they tune plans and make the optimizer's state.
    peaks = {name: [float(turn.peak) for turn in turns[-1:]] for name, turns in done.items()}
    than = settings.variants[0].name
    yield table_of(f"step of {title}", times, unit="ms", scale=1000, than=than, column="x ddp")
    yield table_of(f"peak memory of {title}", peaks, unit="MiB", scale=1 / MIB, than=than, column="x ddp")


def table_of(
    title: str, samples: Mapping[str, Sequence[float]], *, unit: str, scale: float, than: str, column: str
) -> Table:
    """Ranges and medians, and the medians as multiples of that of one variant."""
    scaled = {name: [value * scale for value in values] for name, values in samples.items()}
    one = statistics.median(scaled.get(than, [float("nan")])) or float("nan")
    rows = {
        name: [min(values), statistics.median(values), max(values), statistics.median(values) / one]
        for name, values in scaled.items()
    }
    return Table(title, [f"{unit}, min", "median", "max", column], rows, samples=scaled)


def measure(args: argparse.Namespace, model: str) -> Iterator[Table]:
    """Tables of one model."""
    settings = LoopSettings(model, tuple(variants_of(args.settle)), steps=args.steps, optimizer="adamw")
    of = f"{model}, AdamW, {place_of(args)}"
    table = partial(table_of, than=settings.variants[1].name, column="x unsharded")

    with Ranks(Loop, settings, place_of(args)) as ranks:
        turns = turns_of(ranks, settings.variants)
        steps = take_turns(turns, repetitions=args.repetitions, seconds=args.seconds)
        yield table(f"step of {of}", steps, unit="ms", scale=1000)
        state = {variant.name: ranks.call("state_bytes", variant.name) for variant in settings.variants}
        yield table(f"optimizer state on each rank of {of}", state, unit="MiB", scale=1 / MIB)
        sent = {variant.name: ranks.call("bytes_sent", variant.name)[:1] for variant in settings.variants}
        yield table(f"sent by all ranks in a step of {of}", sent, unit="MiB", scale=1 / MIB)
        if args.memory:
            # Others than those that have trained: what they have left would be freed while a step is measured. Those
            # are still there, because MPS does not take clients while it ends for want of any.
            with Ranks(Peaks, settings, place_of(args)) as fresh:
                names = [variant.name for variant in settings.variants]
                peaks = {name: [float(peak) for peak in fresh.call("peak", name, 1)] for name in names}
            yield table(f"peak memory on each rank of {of}", peaks, unit="MiB", scale=1 / MIB)
    if args.trainer:
        with Ranks(Fits, settings, place_of(args)) as ranks:
            turns = turns_of(ranks, settings.variants)
            fits = take_turns(turns, repetitions=args.repetitions, seconds=args.seconds)
            yield table(f"step through the Trainer of {of}", fits, unit="ms", scale=1000)


if __name__ == "__main__":
    main()
