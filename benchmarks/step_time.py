"""Time of a training step: bucketddp beside torch DDP with each of its flags.

    python -m benchmarks.step_time --model mlp --through trainer
    python -m benchmarks.step_time --model gpt2 --device cuda --wire fp32 bf16 --bucket-cap-mb 25 100

Variants take turns within one run and medians are compared, never times of different runs. Several ranks on one GPU
share it: each gets a host of its own so that NCCL agrees, which then talks over sockets as between machines (start
NVIDIA's MPS first, else their kernels take turns).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.command import parser_of, place_of, turns_of, write
from benchmarks.loop import Loop, LoopSettings
from benchmarks.models import WORKLOADS
from benchmarks.ranks import Ranks
from benchmarks.report import Table, table_of
from benchmarks.turns import take_turns
from benchmarks.variants import ALONE, WIRES, ddp_variants, our_variants


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, repetitions=20, ranks=2)
    parser.add_argument("--model", choices=WORKLOADS, default="tiny_layers", help="(default: tiny_layers)")
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1], help="micro-batches per step (default: 1)")
    parser.add_argument("--wire", choices=WIRES, nargs="+", default=["fp32"], help="what travels (default: fp32)")
    parser.add_argument("--bucket-cap-mb", type=_cap, nargs="+", default=[], help="of bucketddp (default: its own)")
    parser.add_argument("--check-gradients", action=argparse.BooleanOptionalAction, help="of bucketddp")
    parser.add_argument("--unused", choices=("none", "same", "changing"), default="none", help="layers left out")
    parser.add_argument("--steps", type=int, default=5, help="measured in each turn (default: 5)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    tables = [measure(args, accumulate=accumulate, wire=wire) for accumulate in args.accumulate for wire in args.wire]
    write(tables, args, place=str(place_of(args)))


def measure(args: argparse.Namespace, *, accumulate: int, wire: str) -> Table:
    """Milliseconds per step, by variant."""
    ours = our_variants(caps=args.bucket_cap_mb, wire=wire, check_gradients=args.check_gradients)
    variants = (ALONE, *ours, *ddp_variants(wire=wire, unused=args.unused != "none"))
    settings = LoopSettings(args.model, variants, accumulate=accumulate, steps=args.steps, unused=args.unused)
    with Ranks(Loop, settings, place_of(args)) as ranks:
        samples = take_turns(turns_of(ranks, variants), repetitions=args.repetitions, seconds=args.seconds)
    title = f"{args.model}, {place_of(args)}, {wire} wire, {accumulate} micro-batches per step"
    table = table_of(title, samples, unit="ms", scale=1000)
    print(table, flush=True)
    return table


def _cap(text: str) -> float | str:
    return text if text == "auto" else float(text)


if __name__ == "__main__":
    main()
