"""Peak memory of a step, and how much more it is than without communication, in units of the gradients' size.

    python -m benchmarks.memory --model mlp
    python -m benchmarks.memory --model gpt2 --device cuda

More by 0.0 is what cannot be avoided; 1.0 is as much again as all gradients, for buckets. On a GPU this is what torch
has allocated on the device; on the CPU, what the profiler sees torch allocate (not what gloo does).
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.command import cap, parser_of, place_of, write
from benchmarks.loop import LoopSettings
from benchmarks.models import WORKLOADS
from benchmarks.peaks import Memory, Peaks
from benchmarks.ranks import Ranks
from benchmarks.report import Table
from benchmarks.variants import ALONE, Variant, can_accumulate, ddp_variants, our_variants, settling_in

MICRO_BATCHES = (1, 2)
STEADY_STEPS = 100
MIB = 2**20


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
    """Peaks by variant, for each number of micro-batches, what is kept, and what the driver was asked for."""
    [num_bytes, *_] = ranks.call("gradient_bytes")
    ranks.call("memory", ALONE.name, 1)  # what libraries allocate once is there then, and counts for none
    alone = {number: _most(ranks, ALONE, number) for number in MICRO_BATCHES}
    rows = {}
    for variant in settings.variants:
        row: list[float] = []
        for number in MICRO_BATCHES:
            if number > 1 and not can_accumulate(variant):
                row += [float("nan")] * 2
                continue
            found = alone[number] if variant.kind == "alone" else _most(ranks, variant, number)
            row += [found.peak / MIB, (found.peak - alone[number].peak) / num_bytes]
            if number == 1:
                kept = (found.kept - alone[number].kept) / num_bytes
        allocations = ranks.call("driver_allocations", variant.name, STEADY_STEPS) if variant.kind == "ours" else [None]
        rows[variant.name] = [*row, kept, float("nan") if None in allocations else max(allocations)]
    columns = ["peak MiB", "more, x gradients", "peak MiB, 2 micro-batches", "more, x gradients"]
    columns += ["kept, x gradients", f"driver allocations, {STEADY_STEPS} steps"]
    return Table(f"{title}; gradients: {num_bytes / MIB:.1f} MiB", columns, rows)


def _most(ranks: Ranks, variant: Variant, micro_batches: int) -> Memory:
    found: list[Memory] = ranks.call("memory", variant.name, micro_batches)
    return Memory(max(memory.peak for memory in found), max(memory.kept for memory in found))


if __name__ == "__main__":
    main()
