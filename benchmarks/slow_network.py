"""Time of a training step of two hosts with a slow network between them: bucketddp beside torch DDP.

    python -m benchmarks.slow_network
    python -m benchmarks.slow_network --rate 1gbit --wire bf16 --bucket-cap-mb 1 25

The hosts are two network namespaces of this machine, joined by a cable that carries no more than `--rate` in each
direction; there is one rank on each, and gloo between them. They end with this command, however it ends, and the
machine's own networks are not touched. Makes its namespaces as an ordinary user, where the machine permits that.

torch DDP's gradients travel as fp32 in all rows: it refuses its hook for bf16 without CUDA.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from benchmarks.command import parser_of, turns_of, write
from benchmarks.hosts import INTERFACE, Host, HostsRefused, two_hosts
from benchmarks.loop import LoopSettings
from benchmarks.models import WORKLOADS
from benchmarks.network_loop import NetworkLoop
from benchmarks.ranks import Place, Ranks
from benchmarks.report import Table, table_of
from benchmarks.turns import take_turns
from benchmarks.variants import ALONE, WIRES, Variant, ddp_variants, our_variants


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, repetitions=5, ranks=2)
    parser.add_argument("--model", choices=WORKLOADS, default="mlp", help="(default: mlp)")
    parser.add_argument(
        "--rate", nargs="+", default=["1gbit", "10gbit"], help="as `tc` takes it (default: 1gbit 10gbit)"
    )
    parser.add_argument("--wire", choices=WIRES, nargs="+", default=list(WIRES), help="of bucketddp (default: both)")
    caps = (5.0, 25.0, 100.0)
    parser.add_argument(
        "--bucket-cap-mb", type=float, nargs="*", default=caps, help="beside its own (default: 5 25 100)"
    )
    parser.add_argument("--steps", type=int, default=2, help="measured in each turn (default: 2)")
    args = parser.parse_args(arguments)
    if args.device != "cpu" or args.ranks != 2:
        parser.error("There is one rank on each of two hosts, and gloo between them: no other --device or --ranks.")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    tables = []
    try:
        for rate in args.rate:
            with two_hosts(rate=rate) as hosts:
                tables.append(measure(args, hosts, rate=rate))
    except HostsRefused as refusal:
        raise SystemExit(
            f"No hosts to measure between: {refusal}. This benchmark makes network namespaces: run it as root, or where"
            " users may make them (in Docker with `--cap-add SYS_ADMIN --cap-add NET_ADMIN`)."
        ) from None
    write(tables, args, place="two hosts (gloo)")


def measure(args: argparse.Namespace, hosts: tuple[Host, Host], *, rate: str) -> Table:
    """Milliseconds per step, by variant."""
    ours = [variant for wire in args.wire for variant in _our_variants(args.bucket_cap_mb, wire)]
    settings = LoopSettings(args.model, (ALONE, *ours, *ddp_variants()), steps=args.steps)
    variables = {"GLOO_SOCKET_IFNAME": INTERFACE, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the hosts' addresses have no names
    place = Place(variables=variables, address=hosts[0].address, within=[host.within for host in hosts])
    with Ranks(NetworkLoop, settings, place) as ranks:
        network = {f"all-reduce alone, {wire}": partial(ranks.slowest, "all_reduce", wire) for wire in args.wire}
        turns = {**network, **turns_of(ranks, settings.variants)}
        samples = take_turns(turns, repetitions=args.repetitions, seconds=args.seconds)
    table = table_of(f"{args.model}, two hosts, {rate} between them", samples, unit="ms", scale=1000)
    print(table, flush=True)
    return table


def _our_variants(caps: Sequence[float], wire: str) -> list[Variant]:
    """With the defaults, and with each of `caps`, named by what travels."""
    variants = [*our_variants(wire=wire), *(our_variants(caps=caps, wire=wire) if caps else [])]
    return [replace(variant, name=f"{variant.name}, {wire}") for variant in variants]


if __name__ == "__main__":
    main()
