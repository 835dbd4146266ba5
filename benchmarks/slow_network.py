"""Time of a training step of two hosts with a slow network between them, by what travels; and what was predicted.

    python -m benchmarks.slow_network
    python -m benchmarks.slow_network --rate 1gbit --wire bf16 --bucket-cap-mb 1 25 --ddp
    python -m benchmarks.slow_network --rate 100mbit 1gbit --wire bf16 int8 --local-steps 10 30 100 --settle 3

The hosts are two network namespaces of this machine, joined by a cable that carries no more than `--rate` in each
direction; there is one rank on each, and gloo between them. They end with this command, however it ends, and the
machine's own networks are not touched. Makes its namespaces as an ordinary user, where the machine permits that.

"all-reduce alone" is the buckets of the first `--wire`, back to back and with nothing else to do: what the network can
do. What leaves a host is counted by its kernel. Predictions are the simulator's, as `bucketddp plan` makes them: from
the step without communication, and from what an all-reduce of fp32 and encoding take by themselves, in the same run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from benchmarks.command import cap, parser_of, write
from benchmarks.counted_steps import CountedSteps
from benchmarks.hosts import INTERFACE, Host, HostsRefused, two_hosts
from benchmarks.loop import LoopSettings
from benchmarks.models import WORKLOADS
from benchmarks.ranks import Place, Ranks
from benchmarks.report import SPEED_UP, Table, best_ddp, is_ddp
from benchmarks.turns import take_turns
from benchmarks.variants import (
    ALONE,
    WIRES,
    Variant,
    ddp_variants,
    local_variant,
    our_variants,
    settling_in,
)
from lightning_bucketddp.config import MIB, ReducerConfig
from lightning_bucketddp.planning.cost import AllReduceCost, Codecs, Profile
from lightning_bucketddp.planning.optimal_plan import local_exchange_s, predict

_ALL_REDUCE, _PROFILE = "all-reduce alone", "profile"
_NAN = float("nan")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, repetitions=5, ranks=2)
    parser.add_argument("--model", choices=WORKLOADS, default="mlp", help="(default: mlp)")
    parser.add_argument(
        "--rate", nargs="+", default=["1gbit", "10gbit"], help="as `tc` takes it (default: 1gbit 10gbit)"
    )
    parser.add_argument("--wire", choices=WIRES, nargs="+", default=list(WIRES), help="what travels (default: all)")
    parser.add_argument("--local-steps", type=int, nargs="*", default=[], metavar="H", help="train alone for H steps")
    parser.add_argument("--bucket-cap-mb", type=cap, nargs="*", default=[], help="beside its own (default: none)")
    parser.add_argument("--ddp", action="store_true", help="measure torch DDP, too")
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


def variants_of(args: argparse.Namespace) -> list[Variant]:
    """What is compared; ours have the wire in their names."""
    variants = [ALONE]
    for wire in args.wire:
        ours = our_variants(wire=wire) + (
            our_variants(caps=args.bucket_cap_mb, wire=wire) if args.bucket_cap_mb else []
        )
        variants += [replace(variant, name=f"{variant.name}, {wire}") for variant in ours]
        variants += ddp_variants(wire=wire) if args.ddp else []
    variants += [local_variant(steps) for steps in args.local_steps]
    return settling_in(args.settle, variants)


def measure(args: argparse.Namespace, hosts: tuple[Host, Host], *, rate: str) -> Table:
    """Milliseconds per step, by variant."""
    settings = LoopSettings(args.model, tuple(variants_of(args)), steps=args.steps)
    variables = {"GLOO_SOCKET_IFNAME": INTERFACE, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the hosts' addresses have no names
    # Killed with this command: a rank that waits for the other one in its start would not notice its end.
    within = [(*host.within, "setpriv", "--pdeathsig", "KILL") for host in hosts]
    place = Place(variables=variables, address=hosts[0].address, within=within)
    with Ranks(CountedSteps, settings, place) as ranks:
        first = next(variant for variant in settings.variants if variant.kind == "ours")
        turns = {
            _ALL_REDUCE: partial(ranks.call, "communicate", first.name),
            **{variant.name: partial(ranks.call, "turn", variant.name) for variant in settings.variants},
            _PROFILE: partial(ranks.call, "profile"),
        }
        samples = take_turns(turns, repetitions=args.repetitions, seconds=args.seconds)
        cost, codecs = ranks.call("network")[0], ranks.call("codecs")[0]
    profiles = [turn[0] for turn in samples.pop(_PROFILE)]
    # A step has ended when the last rank has made it.
    seconds = {name: [max(taken for taken, _ in turn) for turn in taken] for name, taken in samples.items()}
    sent = {name: statistics.median(turn[0][1] for turn in taken) for name, taken in samples.items()}
    predicted = {
        variant.name: statistics.median(predict_step(variant, profile, cost, codecs) for profile in profiles)
        for variant in settings.variants
        if variant.kind in ("ours", "local")
    }
    table = table_of(f"{args.model}, two hosts, {rate} between them", seconds, sent=sent, predicted_s=predicted)
    print(table, flush=True)
    return table


def predict_step(variant: Variant, profile: Profile, cost: AllReduceCost, codecs: Codecs) -> float:
    """Seconds of a step, as the simulator has it."""
    if variant.local_steps is None:
        return predict(profile, ReducerConfig(**variant.options), cost, codecs=codecs).step_s
    alone = predict(profile, ReducerConfig(), cost.slower(0)).step_s
    return alone + local_exchange_s(profile, cost) / variant.local_steps


def table_of(
    title: str,
    seconds: Mapping[str, Sequence[float]],
    *,
    sent: Mapping[str, float],
    predicted_s: Mapping[str, float],
) -> Table:
    """Medians with what is sent meanwhile, against bf16, and against what was predicted."""
    ms = {name: [1e3 * value for value in values] for name, values in seconds.items()}
    medians = {name: statistics.median(values) for name, values in ms.items()}
    bf16, ddp = medians.get("bucketddp, bf16", _NAN), best_ddp(medians)
    has_ddp = any(is_ddp(name) for name in medians)
    rows = {}
    for name, median in medians.items():
        predicted = 1e3 * predicted_s.get(name, _NAN)
        rows[name] = [
            *(median, min(ms[name]), max(ms[name])),
            *(sent[name] / MIB, sent[name] * 8 / (median * 1e6)),
            *(bf16 / median, predicted, median / predicted),
            *([ddp / median] if has_ddp else []),
        ]
    columns = ["median ms", "min", "max", "MiB sent", "Gbit/s", "speed-up over bf16", "predicted ms", "x predicted"]
    return Table(title, columns + [SPEED_UP] * has_ddp, rows, samples=ms)


if __name__ == "__main__":
    main()
