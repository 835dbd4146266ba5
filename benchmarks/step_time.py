"""Time of a training step: bucketddp beside torch DDP with each of its flags.

    python -m benchmarks.step_time --model mlp --through trainer
    python -m benchmarks.step_time --model gpt2 --device cuda --wire fp32 bf16 --bucket-cap-mb 25 100

Variants take turns within one run and medians are compared, never times of different runs. Several ranks on one GPU
share it: each gets a host of its own so that NCCL agrees, which then talks over sockets as between machines (start
NVIDIA's MPS first, else their kernels take turns).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

from benchmarks.command import cap, parser_of, place_of, turns_of, write
from benchmarks.fits import Fits
from benchmarks.loop import Loop, LoopSettings
from benchmarks.models import WORKLOADS
from benchmarks.ranks import Ranks
from benchmarks.report import Table, table_of
from benchmarks.turns import take_turns
from benchmarks.variants import ALONE, WIRES, can_accumulate, ddp_variants, our_variants, settling_in, with_unused

BENCHES = {"loop": Loop, "trainer": Fits}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, repetitions=20, ranks=2)
    parser.add_argument("--model", choices=WORKLOADS, default="tiny_layers", help="(default: tiny_layers)")
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1], help="micro-batches per step (default: 1)")
    parser.add_argument("--wire", choices=WIRES, nargs="+", default=["fp32"], help="what travels (default: fp32)")
    parser.add_argument("--bucket-cap-mb", type=cap, nargs="+", default=[], help="of bucketddp (default: its own)")
    parser.add_argument("--no-check", action="store_true", help="`on_nonfinite=None` of bucketddp")
    parser.add_argument(
        "--unused", choices=("same", "changing"), help="also leave out every tenth layer, or others in each step"
    )
    parser.add_argument("--steps", type=int, default=5, help="measured in each turn (default: 5)")
    parser.add_argument(
        "--through", choices=BENCHES, default="loop", help="the real Trainer, or a bare loop (default: loop)"
    )
    args = parser.parse_args(arguments)
    if args.through == "trainer" and args.device == "cpu" and "bf16" in args.wire:
        parser.error(
            "Lightning ignores torch DDP's hooks on the CPU: measure `--wire bf16` there with `--through loop`."
        )
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    tables = []
    for accumulate in args.accumulate:
        for wire in args.wire:
            tables += measure(args, accumulate=accumulate, wire=wire)
    write(tables, args, place=str(place_of(args)))


def measure(args: argparse.Namespace, *, accumulate: int, wire: str) -> list[Table]:
    """Milliseconds per step, by variant; models with unused layers, which took turns with the others, apart."""
    ours = our_variants(caps=args.bucket_cap_mb, wire=wire, looks_for_nonfinite=not args.no_check)
    theirs = [variant for variant in ddp_variants(wire=wire) if accumulate == 1 or can_accumulate(variant)]
    groups = [settling_in(args.settle, [ALONE, *ours, *theirs])]
    if args.unused is not None:
        groups.append([unused for variant in groups[0] if (unused := with_unused(variant, args.unused)) is not None])
    settings = LoopSettings(args.model, tuple(itertools.chain(*groups)), accumulate=accumulate, steps=args.steps)
    with Ranks(BENCHES[args.through], settings, place_of(args)) as ranks:
        turns = turns_of(ranks, settings.variants)
        samples = take_turns(turns, repetitions=args.repetitions, seconds=args.seconds)
    title = f"{args.model} through the {args.through}, {place_of(args)}, {wire} wire, {_micro_batches(accumulate)}"
    tables = [
        table_of(title, {variant.name: samples[variant.name] for variant in group}, unit="ms", scale=1000)
        for group in groups
    ]
    print(*tables, sep="\n", flush=True)
    return tables


def _micro_batches(number: int) -> str:
    return "1 micro-batch" if number == 1 else f"{number} micro-batches"


if __name__ == "__main__":
    main()
