"""Peak memory of a step over that of the same step without communication, in units of the gradients' size.

    python -m benchmarks.memory --model mlp
    python -m benchmarks.memory --model gpt2 --device cuda

1.0 is the gradients of the loop without communication and nothing else; 2.0 is as much again for buckets. On a GPU this
is what torch has allocated on the device; on the CPU, what the profiler sees torch allocate (not what gloo does).
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.command import cap, parser_of, place_of, write
from benchmarks.loop import LoopSettings
from benchmarks.models import WORKLOADS
from benchmarks.peaks import Peaks
from benchmarks.ranks import Ranks
from benchmarks.report import Table
from benchmarks.variants import ALONE, Variant, can_accumulate, ddp_variants, our_variants, settling_in

MICRO_BATCHES = (1, 2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, ranks=2)
    parser.add_argument("--model", choices=WORKLOADS, default="mlp", help="(default: mlp)")
    parser.add_argument("--bucket-cap-mb", type=cap, nargs="+", default=[], help="of bucketddp (default: its own)")
    args = parser.parse_args(arguments)
    variants = settling_in(args.settle, [ALONE, *our_variants(caps=args.bucket_cap_mb), *ddp_variants()])
    settings = LoopSettings(args.model, tuple(variants))
    with Ranks(Peaks, settings, place_of(args)) as ranks:
        table = measure(ranks, settings, title=f"{args.model}, {place_of(args)}")
    print(table, flush=True)
    write([table], args, place=str(place_of(args)))


def measure(ranks: Ranks, settings: LoopSettings, *, title: str) -> Table:
    """Peaks by variant, for each number of micro-batches."""
    [num_bytes, *_] = ranks.call("gradient_bytes")
    alone = {number: ranks.slowest("peak", ALONE.name, number) for number in MICRO_BATCHES}

    def extra(variant: Variant, number: int) -> float:
        if number > 1 and not can_accumulate(variant):
            return float("nan")
        return 1 + (ranks.slowest("peak", variant.name, number) - alone[number]) / num_bytes

    variants = [variant for variant in settings.variants if variant.kind != "alone"]
    rows = {variant.name: [extra(variant, number) for number in MICRO_BATCHES] for variant in variants}
    columns = ["x gradients, 1 micro-batch", "2 micro-batches"]
    return Table(f"{title}; gradients: {num_bytes / 2**20:.1f} MiB", columns, rows)


if __name__ == "__main__":
    main()
