"""Time of a training step of two hosts with a slow network between them: bucketddp beside torch DDP.

    python -m benchmarks.slow_network
    python -m benchmarks.slow_network --rate 1gbit --wire bf16 --bucket-cap-mb 1 25

The hosts are two network namespaces of this machine, joined by a cable that carries no more than `--rate` in each
direction; there is one rank on each, and gloo between them. They end with this command, however it ends, and the
machine's own networks are not touched. Makes its namespaces as an ordinary user, where the machine permits that.

"all-reduce alone" is the buckets of bucketddp, back to back and with nothing else to do: what the network can do.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from benchmarks.command import cap, parser_of, turns_of, write
from benchmarks.hosts import INTERFACE, Host, HostsRefused, two_hosts
from benchmarks.limits import Limits
from benchmarks.loop import LoopSettings
from benchmarks.models import WORKLOADS
from benchmarks.ranks import Place, Ranks
from benchmarks.report import Table, table_of
from benchmarks.turns import take_turns
from benchmarks.variants import ALONE, WIRES, Wire, ddp_variants, our_variants, settling_in


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, repetitions=5, ranks=2)
    parser.add_argument("--model", choices=WORKLOADS, default="mlp", help="(default: mlp)")
    parser.add_argument(
        "--rate", nargs="+", default=["1gbit", "10gbit"], help="as `tc` takes it (default: 1gbit 10gbit)"
    )
    parser.add_argument("--wire", choices=WIRES, nargs="+", default=list(WIRES), help="what travels (default: both)")
    caps = (5.0, 25.0, 100.0)
    parser.add_argument("--bucket-cap-mb", type=cap, nargs="*", default=caps, help="beside its own (default: 5 25 100)")
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
                tables += [measure(args, hosts, rate=rate, wire=wire) for wire in args.wire]
    except HostsRefused as refusal:
        raise SystemExit(
            f"No hosts to measure between: {refusal}. This benchmark makes network namespaces: run it as root, or where"
            " users may make them (in Docker with `--cap-add SYS_ADMIN --cap-add NET_ADMIN`)."
        ) from None
    write(tables, args, place="two hosts (gloo)")


def measure(args: argparse.Namespace, hosts: tuple[Host, Host], *, rate: str, wire: Wire) -> Table:
    """Milliseconds per step, by variant."""
    [ours] = our_variants(wire=wire)
    others = our_variants(caps=args.bucket_cap_mb, wire=wire) if args.bucket_cap_mb else []
    variants = settling_in(args.settle, [ALONE, ours, *others, *ddp_variants(wire=wire)])
    settings = LoopSettings(args.model, tuple(variants), steps=args.steps)
    variables = {"GLOO_SOCKET_IFNAME": INTERFACE, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the hosts' addresses have no names
    # Killed with this command: a rank that waits for the other one in its start would not notice its end.
    within = [(*host.within, "setpriv", "--pdeathsig", "KILL") for host in hosts]
    place = Place(variables=variables, address=hosts[0].address, within=within)
    with Ranks(Limits, settings, place) as ranks:
        turns = {
            "all-reduce alone": partial(ranks.slowest, "communicate", ours.name),
            **turns_of(ranks, settings.variants),
        }
        samples = take_turns(turns, repetitions=args.repetitions, seconds=args.seconds)
    title = f"{args.model}, two hosts, {rate} between them, {wire} wire"
    table = table_of(title, samples, unit="ms", scale=1000)
    print(table, flush=True)
    return table


if __name__ == "__main__":
    main()
